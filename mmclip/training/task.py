"""What a Trainer needs of a modality: network, loss, batches, schedule, validation and export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from mmclip.config import TextTrainConfig, TrainConfig
from mmclip.data.image_text import BadSample
from mmclip.evaluation.results import Results
from mmclip.losses.contrastive import ContrastiveLoss, LossOutput
from mmclip.roles import Direction, Exponents
from mmclip.similarity import TINY, mean_norm_factor
from mmclip.training.monitors import Advice, BadSamples

Json = dict[str, Any]


class Batch(Protocol):
    """Rows of a step on one process: ``keys`` name them, ``bad`` are those that could not be read."""

    keys: list[str]
    bad: list[BadSample]

    def split(self, size: int, parts: int | None = None) -> Sequence[Self]:
        """Parts of at most ``size`` rows, in order; or ``parts`` even ones."""
        ...


class Task(Protocol):
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
    clips_loss: ClassVar[bool] = True  # whether the gradient norm counts alpha and gamma

    config: TrainConfig | TextTrainConfig
    encoder: nn.Module  # the trained network, which DDP, FSDP and torch.compile wrap
    network: nn.Module  # the network of ``model``: ``encoder`` or, with FSDP, a copy of it
    model: Any  # validated, evaluated and exported
    locked: set[str]  # state-dict names of ``encoder`` that never change
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
    validation_queries: dict[str, int]  # by direction; {} without validation data
    bad_samples: BadSamples

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Any]:
        """This process's batches of an epoch, a function of (seed, epoch, row) alone."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Arguments of ``encoder`` for a batch, on the device."""

    def compute_loss(self, features: dict[str, Tensor], batch: Any, log: bool) -> tuple[LossOutput, Json]:
        """Loss of all processes' rows from this one's raw features by ``outputs``, and news for metrics.jsonl.

        A step that is logged (``log``) has the losses of untrained directions, too.
        """

    def build_optimizer(self) -> torch.optim.AdamW:
        """AdamW over the parameters of ``encoder`` and ``loss``; groups have ``peak_lr``."""

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rates at a step counted from 0."""

    def begin_step(self, step: int) -> None:
        """Set what a schedule changes at a step."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Half precision of the encoder's matrix products, where the run has it."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision != "fp32")

    def checkpoint_gradients(self, enable: bool) -> None:
        """Switch --grad-checkpointing of ``encoder``."""

    def use_copy(self, network: Any) -> None:
        """Validate, evaluate and export ``network``, a copy of ``encoder``."""

    def validate(self, exponents: Exponents) -> dict[str, float]:
        """{"val_DIRECTION_METRIC_SCORING": rate}, natively and by cosine."""

    def introduction(self) -> list[str]:
        """Data and model of the run in a few lines."""

    def baseline(self) -> Json:
        """start.json: the evaluation of the untrained model, and Fisher condition numbers of training pairs."""

    def first_alpha(self, direction: Direction, query: Tensor, document: Tensor) -> float:
        """alpha of a direction: the loss's own, or what a first batch of these pairs, raw [N, D], would set."""
        similarity = self.loss.similarity
        if self.loss.weights[direction] > 0 and similarity.has_norm_stats(direction):
            return float(similarity.scale(direction))
        return similarity.scale_init / max(float(mean_norm_factor(query, document, similarity.exponents)), TINY)

    def export(self, folder: Path, steps: int) -> str:
        """Write the trained model; returns how to score with it, in words."""

    def evaluate(self, steps: int, seconds: float) -> Iterator[tuple[str, Results]]:
        """Results of the trained model by folder of the run, "" for its own, which comes last."""
