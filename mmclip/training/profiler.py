"""--benchmark: how fast the steps of a run are, what part of the machine they use, and where their time goes.

The steps are the run's own (mmclip.training.step.Stepper on the run's batches). Nothing is written, validated or exported.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmclip import distributed
from mmclip.console import progress_bar
from mmclip.data.loading import Batch, ReaderDied
from mmclip.errors import UserError
from mmclip.reporting.table_parts import column, make_console, new_table, row
from mmclip.training import failures
from mmclip.training.signals import Interrupts
from mmclip.training.step import NotFinite
from mmclip.training.trainer import Trainer

WARMUP = 5  # steps before the clock starts: memory is allocated, kernels are chosen, readers are ahead
PARTS = ("data wait", "transfer, preprocessing", "towers forward", "loss", "backward", "optimizer")
SIZES = {"cpu": 2048, "cuda": 8192, "mps": 4096}  # rows of the square matrices that the machine's rate is taken with


@dataclass(frozen=True)
class Measured:
    """steps: how many; samples: of all processes a step; seconds: of a step, the median; per_second: samples of all
    steps by all of their time; parts [steps, or fewer after a signal] of seconds by PARTS' names; flops: of the towers,
    forward and backward, of a process's step; rate: FLOP/s that a matrix product reaches here; peak: bytes."""

    steps: int
    samples: float
    seconds: float
    per_second: float
    parts: dict[str, list[float]]
    flops: int
    rate: float
    peak: int

    @property
    def mfu(self) -> float:
        return self.flops / self.seconds / self.rate


class Clock:
    """Time by parts of a step: ``turn`` ends one part and begins another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin()

    def begin(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.part, self.since = PARTS[0], now(self.device)

    def turn(self, part: str) -> None:
        time_now = now(self.device)
        self.spent[self.part] += time_now - self.since
        self.part, self.since = part, time_now

    def around(self, function: Callable[..., Any], part: str, after: str) -> Callable[..., Any]:
        """``function``, during which ``part`` runs, and behind it ``after``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.turn(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn(after)

        return timed


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def measure(trainer: Trainer, steps: int) -> tuple[Measured | None, int]:
    """Take WARMUP steps, ``steps`` untouched ones for the speed, and as many with the clock around their parts.

    Returns what was found, and 0 or the number of the signal that ended it after the step that it came in: then it is
    of the steps so far, None before the first one. Errors: UserError where a step cannot be taken.
    """
    with progress_bar() as bar, Interrupts("leaving after this step, with what is measured") as interrupts:
        bar.disable = bar.disable or trainer.rank != 0
        advance = partial(bar.advance, bar.add_task("steps", total=WARMUP + 2 * steps, note=""))
        found = _measure(trainer, steps, _batches(trainer, advance, interrupts))
        return found, distributed.largest([interrupts.signum], trainer.device)[0]


def _measure(trainer: Trainer, steps: int, batches: Iterator[Batch]) -> Measured | None:
    device = trainer.device
    for batch in itertools.islice(batches, WARMUP):
        _take(trainer, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    seen, start, end = 0, now(device), 0.0
    for _ in range(steps):
        before = time.perf_counter()
        following = next(batches, None)
        if following is None:
            break
        batch = following
        _take(trainer, batch)
        end = time.perf_counter()
        times.append(end - before)  # a step ends with a question to the device (Stepper.take)
        seen += len(batch.image_id)
    if not times:
        return None
    elapsed = (now(device) if len(times) == steps else end) - start
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident()
    parts = _parts(trainer, batches, steps)
    samples = sum(distributed.gather_objects(seen))
    return Measured(
        len(times), samples / len(times), statistics.median(times), samples / elapsed, parts,
        count_flops(trainer, batch), matrix_rate(device, trainer.runner.precision), peak,
    )  # fmt: skip


def _batches(trainer: Trainer, told: Callable[[], None], interrupts: Interrupts) -> Iterator[Batch]:
    """Epoch after epoch, each batch told, until any process has a signal. Errors: UserError for an epoch in which no
    picture can be read."""
    epoch = 0
    while True:
        taken = 0
        try:
            for batch in trainer.batches.batches(epoch):
                stop, news, empty = trainer.agreed(batch, interrupts)
                if stop:
                    return
                if news:
                    trainer.note_bad(batch)  # run.train names them behind the numbers
                if not empty:
                    taken += 1
                    told()
                    yield batch
        except ReaderDied:  # by a signal to the whole group: this process answers it as the others do
            if not interrupts.signum:
                raise
            distributed.largest([interrupts.signum, 0, 0], trainer.device)
            return
        if not taken:
            raise UserError("--benchmark: no step of an epoch has pictures that can be read")
        epoch += 1


def _take(trainer: Trainer, batch: Batch) -> None:
    trainer.towers.train()
    trainer.loss.train()
    step = min(trainer.step, trainer.total_steps - 1)
    try:
        trainer.stepper.take(batch, step, trainer.warmup, trainer.total_steps, False)
    except NotFinite as error:
        raise UserError(f"--benchmark: step {trainer.step + 1}: the loss is {error.facts['loss']}") from None
    except torch.OutOfMemoryError as error:
        raise failures.out_of_memory(trainer.step + 1, trainer.settings.batch_size, error) from None
    trainer.step += 1


class _Timed(nn.Module):
    """A network whose forward passes a clock sees; all else is the network's."""

    def __init__(self, network: nn.Module, clock: Clock) -> None:
        super().__init__()
        self._orig_mod = network  # a name under which Stepper looks for DDP
        self.clock = clock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.clock.around(self._orig_mod, "towers forward", "loss")(*args, **kwargs)


def _parts(trainer: Trainer, batches: Iterator[Batch], steps: int) -> dict[str, list[float]]:
    """Seconds of each part in ``steps`` steps, fewer where the batches end. What lies between forward and
    backward is the loss, its gathering included; what lies behind, the gradient's norm and the optimizer."""
    clock, stepper, engine = Clock(trainer.device), trainer.stepper, torch.autograd.backward
    network, inputs = stepper.network, stepper.source.inputs
    stepper.network = _Timed(network, clock)
    stepper.source.inputs = clock.around(inputs, PARTS[1], PARTS[1])  # type: ignore[method-assign]
    torch.autograd.backward = clock.around(engine, "backward", "optimizer")
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    try:
        for _ in range(steps):
            clock.begin()
            batch = next(batches, None)
            if batch is None:
                break
            clock.turn("optimizer")
            _take(trainer, batch)
            clock.turn(PARTS[0])
            for part in PARTS:
                found[part].append(clock.spent[part])
    finally:
        torch.autograd.backward, stepper.network = engine, network
        del stepper.source.inputs
    return found


def count_flops(trainer: Trainer, batch: Batch) -> int:
    """Floating-point operations of the towers' forward and backward pass over a process's batch, each counted once
    (--accum-freq and --grad-checkpointing run forward twice); attention's products where torch can count them."""
    trainer.towers.clip.set_grad_checkpointing(False)
    total, source, device = 0, trainer.source, trainer.device
    for part in trainer.stepper.parts(batch):  # with --fsdp all processes pass together
        (images, from_image), (texts, from_text) = (source.inputs(s, part, device) for s in ("image", "text"))
        images = images if from_image else trainer.model.pixels(images)
        with FlopCounterMode(display=False) as counter:
            with trainer.runner.autocast():
                image, text = trainer.towers(images, texts, from_image, from_text)
            (image.sum() + text.sum()).backward()
        total += counter.get_total_flops()
    trainer.stepper.optimizer.zero_grad(set_to_none=True)
    trainer.towers.clip.set_grad_checkpointing(trainer.settings.grad_checkpointing)
    return total


@torch.no_grad()
def matrix_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of a large square matrix product in the run's precision: the best of five."""
    n, dtype = SIZES.get(device.type, 2048), torch.float32 if precision == "fp32" else torch.bfloat16
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(6):  # the first one warms up
        start = now(device)
        a @ b
        times.append(now(device) - start)
    return 2 * n**3 / min(times[1:])


def _resident() -> int:
    """Bytes that this process has held at most, without its readers'."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def show(found: Measured, trainer: Trainer, steps: int, console: Console | None = None) -> None:
    """The numbers, and a table of the parts: medians, and shares of the sum of all parts' medians. ``steps``: how many
    were asked for."""
    console = console or make_console()
    dtype = "float32" if trainer.runner.precision == "fp32" else "bfloat16"
    kind = "allocated on the GPU" if trainer.device.type == "cuda" else "resident, readers aside"
    console.print(
        f"{found.per_second:,.1f} samples/s: {_steps(found.steps, steps)} of {found.samples:,.0f}, median "
        f"{1e3 * found.seconds:,.1f} ms, {trainer.ranks} process{'es' if trainer.ranks > 1 else ''} on {trainer.device}"
    )
    console.print(
        f"MFU {found.mfu:.1%} in the median step: {found.flops / 1e9:,.1f} GFLOP of the towers a step and process, "
        f"forward and backward counted once, against {found.rate / 1e9:,.0f} GFLOP/s of a {dtype} matrix product "
        "measured here"
    )
    console.print(f"peak memory {found.peak / 2**20:,.0f} MiB ({kind})")
    timed = len(found.parts[PARTS[0]])
    if not timed:
        console.print("where the time of a step goes is not measured: that is asked of further steps")
        return
    medians = {part: statistics.median(times) for part, times in found.parts.items()}
    console.print(f"where {_steps(timed, steps, 'more ')} go, waiting for the device at each part's end:")
    table = new_table("part of a step")
    column(table, "median", "ms")
    column(table, "", "  share")
    for part, median in medians.items():
        row(table, [part, f"{1e3 * median:,.2f}", f"{median / sum(medians.values()):.0%}"])
    console.print(table)


def _steps(taken: int, asked: int, more: str = "") -> str:
    return f"{taken if taken == asked else f'{taken} of {asked}'} {more}step{'s' if asked > 1 else ''}"
