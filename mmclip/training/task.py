"""What a Trainer needs of a modality: its network and loss, its batches, its schedule, its validation and its export."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from mmclip.config import TextTrainConfig, TrainConfig
from mmclip.data.image_text import BadSample
from mmclip.evaluation.results import Results
from mmclip.losses.contrastive import ContrastiveLoss, LossOutput
from mmclip.roles import Exponents
from mmclip.training.monitors import Advice, BadSamples

Json = dict[str, Any]


class Batch(Protocol):
    """Rows of a step on one process: ``keys`` name them, ``bad`` are those that could not be read."""

    keys: list[str]
    bad: list[BadSample]

    def split(self, size: int, parts: int | None = None) -> Sequence[Self]:
        """Parts of at most ``size`` rows, in order; or ``parts`` even ones."""
        ...


class Task(ABC):
    """One modality of training.

    A command calls ``open_data``, before anything heavy is loaded, then ``load_model`` and ``open`` with both. The
    network maps :meth:`inputs` to raw features [B, D] in the order of ``outputs``: both sides, and "negative" [B, K, D]
    where pairs have hard negatives.
    """

    sides: ClassVar[tuple[str, str]]
    unit: ClassVar[str]  # of what a step consumes, as in "samples_per_second"
    advice: ClassVar[Advice]
    metric: ClassVar[str]  # of the validation
    validates_last: ClassVar[bool] = False  # also after the last step; otherwise the evaluation follows
    partial_gradients: ClassVar[bool] = False  # a step may leave parameters without gradient

    config: TrainConfig | TextTrainConfig
    encoder: nn.Module  # the trained network, which DDP, FSDP and torch.compile wrap
    model: Any  # validated, evaluated and exported; its network is ``encoder`` or, with FSDP, a copy of it
    loss: ContrastiveLoss
    device: torch.device
    precision: str
    outputs: tuple[str, ...]
    part_size: int  # rows of a forward pass; larger batches are accumulated exactly
    accumulates: bool  # whether a batch may be larger than that
    steps_per_epoch: int
    total_steps: int
    val_steps: int  # between validations
    warmup: int
    global_batch: int  # pairs of a step of all processes
    candidates: float  # of a query in a step
    fingerprints: dict[str, str]  # digests of the training data ("data") and of locked weights
    bad_samples: BadSamples

    # --- a step ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Any]:
        """This process's batches of an epoch, a function of (seed, epoch, row) alone."""

    @abstractmethod
    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Arguments of ``encoder`` for a batch, on the device."""

    @abstractmethod
    def compute_loss(self, features: dict[str, Tensor], batch: Any, log: bool) -> tuple[LossOutput, Json]:
        """Loss of all processes' rows, and news of the step for metrics.jsonl.

        Args:
            features: Raw features of this process by name of ``outputs``.
            batch: Their batch.
            log: Whether the step is logged, with the losses of untrained directions, too.
        """

    @abstractmethod
    def build_optimizer(self) -> torch.optim.AdamW:
        """AdamW over the parameters of ``encoder`` and ``loss``; groups have ``peak_lr``."""

    @abstractmethod
    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rates at a step counted from 0."""

    def clipped(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Those of the optimizer's parameters whose gradient norm is measured and clipped."""
        return parameters

    def begin_step(self, step: int) -> None:  # noqa: B027
        """Set what a schedule changes at a step."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Half precision of the encoder's matrix products, where the run has it."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision != "fp32")

    @abstractmethod
    def checkpoint_gradients(self, enable: bool) -> None:
        """Switch --grad-checkpointing of ``encoder``."""

    @abstractmethod
    def use_copy(self, network: nn.Module) -> None:
        """Validate, evaluate and export ``network``, a copy of ``encoder``."""

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The network in ``model``: ``encoder`` or its copy."""

    def locked_names(self) -> set[str]:
        """State-dict names of ``encoder`` that never change."""
        return set()

    # --- validation, evaluation, export ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def validation_queries(self) -> dict[str, int]:
        """Validation queries by direction; {} without validation data."""

    @abstractmethod
    def validate(self, exponents: Exponents) -> dict[str, float]:
        """{"val_DIRECTION_METRIC_SCORING": rate}, natively and by cosine."""

    @abstractmethod
    def introduction(self) -> list[str]:
        """Data and model of the run in a few lines."""

    @abstractmethod
    def baseline(self) -> Json:
        """start.json: the evaluation of the untrained model, and Fisher condition numbers of training pairs."""

    @abstractmethod
    def export(self, folder: Path, steps: int) -> str:
        """Write the trained model; what to tell the user of it."""

    @abstractmethod
    def evaluate(self, steps: int, seconds: float) -> Iterator[tuple[str, Results]]:
        """Results of the trained model by folder of the run, "" for its own, which comes last.

        Args:
            steps: Steps taken.
            seconds: Time of the training.
        """
