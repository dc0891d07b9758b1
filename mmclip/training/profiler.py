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
from mmclip.errors import UserError
from mmclip.training.signals import SignalHandler
from mmclip.training.step import PHASES, NotFinite
from mmclip.training.task import Batch
from mmclip.training.trainer import Trainer

WARMUP = 5  # steps before the clock starts: memory is allocated, kernels are chosen, readers are ahead
SIZES = {"cpu": 2048, "cuda": 8192, "mps": 4096}  # rows of the square matrices that measure the machine's rate


@dataclass(frozen=True)
class Measured:
    """Measurement of a run's steps."""

    steps: int
    samples: float  # of all processes, a step
    seconds: float  # median of a step
    per_second: float  # samples of all steps by their whole time
    phases: dict[str, list[float]]  # seconds in each of as many further steps (fewer after a signal)
    flops: int  # operations of the encoder's forward and backward pass in a step of one process
    rate: float  # FLOP/s of a matrix product here
    peak: int  # bytes, of the GPU or of the process without its readers

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.flops / self.seconds / self.rate


class Clock:
    """Seconds by phase: each call ends a phase and begins another."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.phase, self.since = device, PHASES[0], now(device)
        self.spent = dict.fromkeys(PHASES, 0.0)

    def __call__(self, phase: str) -> None:
        moment = now(self.device)
        self.spent[self.phase] += moment - self.since
        self.phase, self.since = phase, moment


def now(device: torch.device) -> float:
    """Seconds on a clock once the device has done all of its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def measure(trainer: Trainer, steps: int) -> tuple[Measured | None, int]:
    """Take WARMUP steps, ``steps`` untouched ones for the speed, and as many with a clock at their phases.

    Returns:
        The measurement, and 0 or the number of the signal that ended it after the step that it came in: then it is of
        the steps so far, None before the first one.
    """
    with progress_bar() as bar, SignalHandler("leaving after this step, with what is measured") as trainer.handler:
        bar.disable = bar.disable or trainer.rank != 0
        advance = partial(bar.advance, bar.add_task("steps", total=WARMUP + 2 * steps, note=""))
        measured = _measure(trainer, steps, _steps(trainer, advance))
        return measured, distributed.largest([trainer.handler.signum], trainer.task.device)[0]


def _steps(trainer: Trainer, advance: Callable[[], None]) -> Iterator[Batch]:
    """Take steps, epoch after epoch, until a process has a signal; yields the batch of each."""
    for epoch in itertools.count():
        before = trainer.step
        for batch, complete in trainer.batches(epoch):
            if complete:
                step, trainer.step = min(trainer.step, trainer.task.total_steps - 1), trainer.step + 1
                try:
                    trainer.stepper.run(batch, step, False)
                except NotFinite as error:
                    raise UserError(f"--benchmark: step {trainer.step}: the loss is {error.facts['loss']}") from None
                advance()
                yield batch
        if trainer.reason:
            return
        if trainer.step == before:
            raise UserError("--benchmark: no step of an epoch has images that can be read")


def _measure(trainer: Trainer, steps: int, taken: Iterator[Batch]) -> Measured | None:
    device = trainer.task.device
    list(itertools.islice(taken, WARMUP))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times, consumed, before = list[float](), 0, now(device)
    start = before
    for batch in itertools.islice(taken, steps):
        end = time.perf_counter()  # a step ends with waiting for the device (TrainStep.run)
        times.append(end - before)
        consumed, before = consumed + len(batch.keys), end
    if not times:
        return None
    elapsed = (now(device) if len(times) == steps else before) - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    phases, samples = _phases(trainer, taken, steps), sum(distributed.gather_objects(consumed))
    flops, rate = count_flops(trainer, batch), matrix_rate(device, trainer.task.precision)
    median, per_second = statistics.median(times), samples / elapsed
    return Measured(len(times), samples / len(times), median, per_second, phases, flops, rate, peak)


def _phases(trainer: Trainer, taken: Iterator[Batch], steps: int) -> dict[str, list[float]]:
    """Seconds of each phase in ``steps`` steps, fewer where they end, waiting for the device at phases' ends."""
    idle, clocks = trainer.stepper.begin_phase, list[Clock]()
    try:
        for _ in range(steps):
            clock = trainer.stepper.begin_phase = Clock(trainer.task.device)
            if next(taken, None) is None:
                break
            clock(PHASES[0])
            clocks.append(clock)
    finally:
        trainer.stepper.begin_phase = idle
    return {phase: [clock.spent[phase] for clock in clocks] for phase in PHASES}


def count_flops(trainer: Trainer, batch: Batch) -> int:
    """Operations of the encoder's forward and backward pass over a process's batch, each counted once.

    Accumulation and --grad-checkpointing run forward twice. Attention counts where torch can count it.
    """
    task, checkpointing = trainer.task, trainer.config.grad_checkpointing
    if checkpointing:
        task.checkpoint_gradients(False)
    with FlopCounterMode(display=False) as counter:
        for part in trainer.stepper.parts(batch):  # with --fsdp all processes pass together
            inputs = task.inputs(part)
            with task.autocast():
                features = task.encoder(*inputs)
            torch.stack([f.sum() for f in features]).sum().backward()
    trainer.stepper.optimizer.zero_grad(set_to_none=True)
    if checkpointing:
        task.checkpoint_gradients(True)
    return int(counter.get_total_flops())


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
