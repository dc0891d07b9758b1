"""--benchmark: speed of a run's steps, their share of what the machine can do, and where their time goes.

The steps are the run's own (:meth:`TrainStep.run` on the run's batches). Nothing is written, validated or exported.
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

import torch
from torch.utils.flop_counter import FlopCounterMode

from mmclip import distributed
from mmclip.console import progress_bar
from mmclip.data.loading import ReaderDied
from mmclip.errors import UserError
from mmclip.training import monitors
from mmclip.training.signals import SignalHandler
from mmclip.training.step import PHASES, NotFinite
from mmclip.training.task import Batch
from mmclip.training.trainer import Trainer

WARMUP = 5  # steps before the clock starts: memory is allocated, kernels are chosen, readers are ahead
SIZES = {"cpu": 2048, "cuda": 8192, "mps": 4096}  # rows of the square matrices that measure the machine's rate


@dataclass(frozen=True)
class Measured:
    """Measurement of a run's steps.

    Attributes:
        steps: Their number.
        samples: Of all processes, a step.
        seconds: Median of a step.
        per_second: Samples of all steps by their whole time.
        phases: Phase -> seconds in each of as many further steps (fewer after a signal).
        flops: Operations of the encoder's forward and backward pass in a step of one process.
        rate: FLOP/s of a matrix product here.
        peak: Bytes, of the GPU or of the process without its readers.
    """

    steps: int
    samples: float
    seconds: float
    per_second: float
    phases: dict[str, list[float]]
    flops: int
    rate: float
    peak: int

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.flops / self.seconds / self.rate


class Clock:
    """Seconds by phase: each call ends a phase and begins another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Begin with no time spent, in the first phase."""
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.phase, self.since = PHASES[0], now(self.device)

    def __call__(self, phase: str) -> None:
        moment = now(self.device)
        self.spent[self.phase] += moment - self.since
        self.phase, self.since = phase, moment


def now(device: torch.device) -> float:
    """Seconds on a clock once the device has done all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def measure(trainer: Trainer, steps: int) -> tuple[Measured | None, int]:
    """Take WARMUP steps, ``steps`` untouched ones for the speed, and as many with a clock at their phases.

    Returns:
        The measurement, and 0 or the number of the signal that ended it after the step that it came in: then it is of
        the steps so far, None before the first one.

    Raises:
        UserError: A step cannot be taken.
    """
    with progress_bar() as bar, SignalHandler("leaving after this step, with what is measured") as handler:
        bar.disable = bar.disable or trainer.rank != 0
        advance = partial(bar.advance, bar.add_task("steps", total=WARMUP + 2 * steps, note=""))
        measured = _measure(trainer, steps, _batches(trainer, advance, handler))
        return measured, distributed.largest([handler.signum], trainer.task.device)[0]


def _measure(trainer: Trainer, steps: int, batches: Iterator[Batch]) -> Measured | None:
    device = trainer.task.device
    for batch in itertools.islice(batches, WARMUP):
        _take(trainer, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    consumed, start, end = 0, now(device), 0.0
    for batch in itertools.islice(batches, steps):
        before = end or start
        _take(trainer, batch)
        end = time.perf_counter()  # a step ends with waiting for the device (TrainStep.run)
        times.append(end - before)
        consumed += len(batch.keys)
    if not times:
        return None
    elapsed = (now(device) if len(times) == steps else end) - start
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident()
    phases = _phases(trainer, batches, steps)
    samples = sum(distributed.gather_objects(consumed))
    return Measured(
        len(times), samples / len(times), statistics.median(times), samples / elapsed, phases,
        count_flops(trainer, batch), matrix_rate(device, trainer.task.precision), peak,
    )  # fmt: skip


def _batches(trainer: Trainer, advance: Callable[[], None], handler: SignalHandler) -> Iterator[Batch]:
    """Batches of epoch after epoch until any process has a signal. Raises: UserError: An epoch without samples."""
    device = trainer.task.device
    for epoch in itertools.count():
        taken = 0
        try:
            for batch in trainer.task.batches(epoch):
                stop, bad, empty = trainer.agreed(batch, handler)
                if stop:
                    return
                if bad:
                    trainer.note_bad(batch)  # the command names them after the numbers
                if not empty:
                    taken += 1
                    advance()
                    yield batch
        except ReaderDied:  # by a signal to the whole group: this process stops as the others do
            if not handler.signum:
                raise
            distributed.largest([handler.signum, 0, 0], device)
            return
        if not taken:
            raise UserError("--benchmark: no step of an epoch has images that can be read")


def _take(trainer: Trainer, batch: Batch) -> None:
    step = min(trainer.step, trainer.task.total_steps - 1)
    try:
        trainer.stepper.run(batch, step, False)
    except NotFinite as error:
        raise UserError(f"--benchmark: step {trainer.step + 1}: the loss is {error.facts['loss']}") from None
    except torch.OutOfMemoryError as error:
        size, advice = trainer.config.batch_size, trainer.task.advice
        raise monitors.out_of_memory(trainer.step + 1, size, advice, error) from None
    trainer.step += 1


def _phases(trainer: Trainer, batches: Iterator[Batch], steps: int) -> dict[str, list[float]]:
    """Seconds of each phase in ``steps`` steps, fewer where the batches end, waiting for the device at phases' ends."""
    clock, idle = Clock(trainer.task.device), trainer.stepper.begin_phase
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    trainer.stepper.begin_phase = clock
    try:
        clock.reset()
        for batch in itertools.islice(batches, steps):
            _take(trainer, batch)
            clock(PHASES[0])
            for phase in PHASES:
                phases[phase].append(clock.spent[phase])
            clock.reset()
    finally:
        trainer.stepper.begin_phase = idle
    return phases


def count_flops(trainer: Trainer, batch: Batch) -> int:
    """Operations of the encoder's forward and backward pass over a process's batch, each counted once.

    Accumulation and --grad-checkpointing run forward twice. Attention counts where torch can count it.
    """
    task, total = trainer.task, 0
    if trainer.config.grad_checkpointing:
        task.checkpoint_gradients(False)
    for part in trainer.stepper.parts(batch):  # with --fsdp all processes pass together
        inputs = task.inputs(part)
        with FlopCounterMode(display=False) as counter:
            with task.autocast():
                features = task.encoder(*inputs)
            torch.stack([f.sum() for f in features]).sum().backward()
        total += counter.get_total_flops()
    trainer.stepper.optimizer.zero_grad(set_to_none=True)
    if trainer.config.grad_checkpointing:
        task.checkpoint_gradients(True)
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
