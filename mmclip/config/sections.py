"""Sections of configs: fields that several commands share, each section a group of --help.

A config inherits its sections, the last one first in files and help, and may give a field another default. The comment
beside a field, or the docstring below it, is its help.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

from mmclip.config import parser as t
from mmclip.errors import UserError
from mmclip.roles import NORMS, POSITIVES

BANK_SIZE = 2000

Norm = Annotated[str, t.one_of(*NORMS)]
Precision = Annotated[str, t.one_of("auto", "fp32", "amp_bf16", "amp_bfloat16")]
Tokens = Annotated[int, t.Check("a whole number of at least 4 tokens", lambda v: v >= 4)]
Workers = Annotated[int, t.Check("a whole number from 0 to 256", lambda v: 0 <= v <= 256)]


class ImageFilesConfig(t.Config):
    """Format of images with captions."""

    dataset_type: Annotated[str, t.one_of("auto", "webdataset", "csv")] = "auto"  # Format of the data.
    csv_img_key: str = "filepath"  # CSV column of image paths.
    csv_caption_key: str = "title"  # CSV column of captions.
    csv_separator: str = "\t"  # CSV separator.
    workers: Workers = 2  # Processes that read and decode images; results do not depend on it.


class ZeroShotConfig(t.Config):
    """Zero-shot classification."""

    zeroshot_data: str | None = None
    """Images by class, for zero-shot accuracy: a folder in clip-benchmark's layout, or builtin:scenes-classes."""
    zeroshot_split: str | None = None  # Split of that folder [test, else val]

    needs = {"zeroshot_split": "zeroshot_data"}


class DeviceConfig(t.Config):
    """Device, precision and seed."""

    precision: Precision = "auto"
    """Autocast of the encoders. auto is bf16 on CUDA and float32 on a CPU; scores are always float32."""
    device: str = "auto"  # auto, cpu, cuda or cuda:N.
    seed: t.Whole = 0  # Seed of everything random: training, subsets, the bank, the bootstrap.


class SimilarityConfig(t.Config):
    """Normalization, logit scale and positives."""

    norm: Norm = "cosine"
    """Normalized embeddings: both (cosine), none (dot), query (qnorm), document (dnorm), or learned exponents."""
    positives: Annotated[str, t.one_of(*POSITIVES)] = "mask"
    """Other positives in the batch, exact duplicates included: left out of the denominator (mask), targets too (multi),
    or negatives (none)."""
    logit_scale_init: t.Positive | None = None
    """Initial effective logit scale, 1 / temperature [14.29, or the checkpoint's]"""
    logit_scale_max: t.Positive = 100.0  # Upper limit of the effective logit scale.
    gamma_init: t.Inner = 0.5
    """Initial exponent of both roles with --norm learned (--init-from a learned run: its own)."""
    focal: t.NotNegative = 0.0  # Focal exponent F: weigh queries by (1 - p)**F, p that of the positives; PACE: 2.
    norm_drift: t.NotNegative = 0.0
    """Weight of the penalty E[log(norm / n0)**2] of each side, n0 its geometric mean norm in the first batch."""

    def check(self) -> None:
        if self.logit_scale_init is not None and self.logit_scale_init > self.logit_scale_max:
            raise UserError(f"{self.as_flag('logit_scale_init')} is above {self.as_flag('logit_scale_max')}")


# What a run may be continued with on purpose: how it goes on, not what it is
CHANGEABLE = ("batch_size", "accum_freq", "loss_batch_size", "mini_batch_size", "lr", "gamma_lr", "wd", "proj_wd",
              "beta1", "beta2", "eps", "warmup", "grad_clip_norm", "precision", "epochs", "max_steps")  # fmt: skip


class OptimizationConfig(t.Config):
    """Optimization."""

    epochs: t.Count = 32  # Passes over the training data; one caption of each image is drawn a pass.
    batch_size: t.Count = 64  # Pairs a step and process (with --accum-freq: a forward pass).
    lr: t.Positive = 5e-4  # Peak learning rate.
    gamma_lr: t.NotNegative = 1e-2  # Peak learning rate of the exponents; 0 holds them at --gamma-init.
    wd: t.NotNegative = 0.2  # Weight decay of matrices; biases, norms, alpha and gamma have none.
    warmup: t.Steps = 0.1  # Warm-up: a number of steps, or a fraction of the run below 1.


class RunConfig(t.Config):
    """Length, memory, checkpoints and logging of a run."""

    max_steps: t.Count | None = None  # Stop after this many steps.
    grad_checkpointing: bool = False  # Recompute activations in the backward pass: less memory, more time.
    logs: str = "logs"  # Folder of runs.
    name: t.FolderName | None = None  # Name of the run's folder [time, loss, norm and seed]
    resume: str | None = None
    """Continue a run: 'latest' (with --name), or a checkpoint file (CLIP). 'latest' starts over a run that was stopped
    before its first checkpoint."""
    measure_start: bool = False
    """Evaluate the model before the first step too, Fisher condition numbers included, into start.json."""
    strict: bool = False  # End the run at an alarm: a direction that dies, a loss that stands still, …
    save_steps: t.Count | None = None  # Steps between checkpoints [an epoch]
    log_every_n_steps: t.Count = 10  # Steps between lines of metrics.jsonl.
    verbose: bool = False  # End with every table, not with a summary alone.
    keep_checkpoints: t.Count = 3  # Number of the newest checkpoints that are kept.
    may_change: list[Annotated[str, t.one_of(*CHANGEABLE)]] | None = None
    """Settings that may differ when a run is continued with --resume; it goes on with the new ones."""
    report_to: Annotated[str, t.one_of("none", "tensorboard")] = "none"  # Further logs, of the extra [tensorboard].
    benchmark: t.Count | None = None
    """Measure N steps after a few to warm up: samples a second, MFU, peak memory and where the time goes. No run
    folder, no validation."""
    torchcompile: bool = False  # Compile the encoder with torch.compile.
    fsdp: bool = False
    """Shard the encoder's weights, gradients and moments over torchrun's processes (FSDP2); checkpoints stay whole."""

    needs = {"may_change": "resume"}
    excludes = {
        ("benchmark", "resume"): "a measurement keeps nothing",
        ("fsdp", "torchcompile"): "a compiled encoder cannot be sharded",
    }

    def __post_init__(self) -> None:
        if self.may_change is not None:
            self.may_change = [name.replace("-", "_") for name in self.may_change]
        super().__post_init__()

    def check(self) -> None:
        if self.report_to == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
            raise UserError("--report-to tensorboard: not installed: pip install 'mmclip[tensorboard]'")


class VerdictConfig(t.Config):
    """Comparison with a control."""

    control: str | None = None
    """Control run, of the same loss and seed with normalized documents: was magnitude learned, and is it useful?"""
    baseline: str | None = None  # Cosine run of the same loss, for that verdict.

    needs = {"baseline": "control"}


class TextModelConfig(DeviceConfig):
    """Text model."""

    model: str | None = None
    """Text model: a sentence-transformers folder or hub name, a run of train-text, or a plain transformers folder."""
    pooling: Annotated[str, t.one_of("mean", "cls", "lasttoken")] | None = None
    """Pooling of a plain transformers model; lasttoken for decoder LLMs."""
    random_init: bool = False  # Random weights: --model is a folder with a config and a tokenizer.
    query_length: Tokens | None = None  # Tokens of a query at most [the model's own]
    document_length: Tokens | None = None  # Tokens of a document at most [the model's own]
    query_prompt: str | None = None  # Text before every query [the model's own]
    document_prompt: str | None = None  # Text before every document [the model's own]
    encode_batch_size: t.Count = 64  # Texts a batch where nothing is trained.

    def check_model(self) -> None:
        """Errors: UserError for a model that is not set, or a folder that does not exist."""
        if self.model is None:
            raise UserError("--model is missing: a sentence-transformers folder or hub name")
        if self.model.startswith((".", "/", "~")) and not Path(self.model).expanduser().is_dir():
            raise UserError(f"{self.as_flag('model')}: no such folder")
