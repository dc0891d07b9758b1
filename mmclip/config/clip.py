"""Configs of the commands for images with captions: train, evaluate, diagnose, embed, report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from mmclip.config import parser as t
from mmclip.config.model_config import CONFIGS, check_model, export_folder, read_metadata
from mmclip.config.sections import (
    BANK_SIZE,
    DeviceConfig,
    ImageFilesConfig,
    OptimizationConfig,
    Precision,
    RunConfig,
    SimilarityConfig,
    VerdictConfig,
    ZeroShotConfig,
)
from mmclip.errors import UserError, printable
from mmclip.roles import FIXED_NORMS, LOSS_WEIGHTS

SCENES = "builtin:scenes"
EMBEDDING_SUFFIXES = (".safetensors", ".npz")
Moment = Annotated[float, t.Check("a number from 0 to below 1", lambda v: 0 <= v < 1)]
Pairs = Annotated[int, t.Check("2 or more pairs: a single pair has no rival", lambda v: v >= 2)]


def parse_aug_cfg(pairs: Sequence[str] | None) -> dict[str, Any]:
    """KEY=VALUE pairs for open_clip's AugmentationCfg: floats, or tuples. Errors: UserError.

    >>> parse_aug_cfg(["scale=0.9,1.0"])
    {'scale': (0.9, 1.0)}
    """
    valid = ("scale", "ratio", "color_jitter", "re_prob", "re_count", "color_jitter_prob", "gray_scale_prob", "none")
    parsed: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or key not in valid:
            raise UserError(f"--aug-cfg {printable(pair)}: KEY=VALUE is expected, with KEY one of {', '.join(valid)}")
        try:
            numbers = tuple(float(v) for v in text.split(","))
        except ValueError:
            numbers = (math.nan,)
        if not all(map(math.isfinite, numbers)):
            raise UserError(f"--aug-cfg {printable(pair)}: numbers expected after '='")
        parsed[key] = numbers if len(numbers) > 1 else int(numbers[0]) if key == "re_count" else numbers[0]
    return parsed


class DataConfig(t.Config):
    """Training and evaluation data."""

    train_data: str = SCENES
    """Training data: 'DIR/{0..5}.tar', a folder in clip-benchmark's layout, a CSV, builtin:scenes. ROOT or ROOT/SPLIT;
    builtin:scenes-uninformative is the null; built-in data are drawn once, into $MMCLIP_DATA, else data/."""
    val_data: str | None = None
    """Validation and evaluation data, or 'none' [--train-data's own evaluation split]"""
    train_split: str | None = None  # Split of a folder to train on [train]
    val_split: str | None = None  # Split of a folder to evaluate on [test, else val]
    val_holdout: t.Count | None = None
    """Evaluate on the last N training images, which are then not trained on: to choose settings without a look at the
    evaluation data."""
    train_fraction: t.Fraction | None = None  # Train on the first share of the images (that --val-holdout leaves).
    train_num_samples: t.Count | None = None  # Train on the first N images only.
    permute_pairs: bool = False
    """Give every training image the captions of another one: a null, in which any effect is an artefact."""
    keep_last: bool = False  # Train on the last, partial batch of an epoch too.
    max_bad_samples: t.Whole | None = None
    """Stop with an error after more unusable training samples than this [skip, count and name them]"""
    aug_cfg: list[str] | None = None
    """Training augmentation, open_clip's: scale=0.9,1 color_jitter=0.2 …; none=1 for the evaluation transform."""

    excludes = {
        ("train_fraction", "train_num_samples"): "both set the number of training images",
        ("val_holdout", "val_data"): "the held-out training images are the evaluation data",
        ("val_holdout", "val_split"): "the held-out training images are the evaluation data",
    }

    def check(self) -> None:
        parse_aug_cfg(self.aug_cfg)


class DirectionConfig(t.Config):
    """Trained directions."""

    loss: Annotated[str, t.one_of(*LOSS_WEIGHTS)] = "sym"
    """Trained directions: both (sym), image-to-text (asym-i2t) or text-to-image (asym-t2i) only."""
    i2t_weight: t.Share | None = None  # Weight of i2t in --loss sym [0.5]


class ScheduleConfig(t.Config):
    """Changes over a run."""

    gamma_schedule: Annotated[str, t.one_of("none", "switch", "anneal")] = "none"
    """Schedule from --gamma-from to --norm: at once at --gamma-start, or linearly from there to --gamma-end; alpha
    keeps the effective scale."""
    gamma_from: Annotated[str, t.one_of(*FIXED_NORMS)] = "cosine"  # Normalization at the start of a schedule.
    gamma_start: t.Steps = 0.5  # Step, or fraction of the run, at which the schedule leaves --gamma-from.
    gamma_end: t.Steps = 0.75  # Step, or fraction of the run, at which an anneal arrives at --norm.
    stage2_lr_factor: t.Positive = 1.0  # Factor of all learning rates after --gamma-schedule switch.
    i2t_weight_end: t.Share | None = None  # Weight of i2t at the last step with --loss sym, linearly from --i2t-weight.

    needs = {
        "stage2_lr_factor": "gamma_schedule switch",
        "gamma_from": "gamma_schedule switch anneal",
        "gamma_start": "gamma_schedule switch anneal",
        "gamma_end": "gamma_schedule anneal",
    }


class LossConfig(ScheduleConfig, SimilarityConfig, DirectionConfig):
    """The loss of a CLIP run."""

    needs = {"i2t_weight": "loss sym", "i2t_weight_end": "loss sym"}

    def check(self) -> None:
        kind, start, end = self.gamma_schedule, self.gamma_start, self.gamma_end
        if kind == "none":
            return
        problem = ""
        if self.norm == "learned":
            problem = "--norm learned trains its exponents; a fixed normalization is expected"
        elif self.norm == self.gamma_from:
            problem = f"--gamma-from {self.gamma_from} is --norm itself, so nothing would change"
        elif kind == "switch" and start == 0:
            problem = "--gamma-start 0 leaves no step before it"
        elif kind == "anneal" and start >= end and (start < 1) == (end < 1):
            problem = f"--gamma-start {start:g} is not before --gamma-end {end:g}"
        if problem:
            raise UserError(f"{self.as_flag('gamma_schedule')}: {problem}")


class ModelConfig(t.Config):
    """Model and initial weights."""

    model: str = "ViT-B-32"  # Model: an open_clip model name, a model config JSON, or local-dir:FOLDER.
    pretrained: str | None = None  # Initial weights: an open_clip tag or a checkpoint file [random weights]
    init_from: str | None = None
    """Start from a finished run: its folder, or its model folder. Architecture, weights, transform and tokenizer are
    its own, whatever --model, --image-trunk and --text-trunk say; alpha keeps its effective scale without
    --logit-scale-init."""
    image_trunk: t.ExistingPath | None = None  # Weights of a timm image trunk: safetensors or .pt.
    text_trunk: t.ExistingPath | None = None  # Hugging Face folder of the text trunk and tokenizer.
    pretrained_image: bool = False  # Load timm's own pretrained weights into a timm image trunk.
    pretrained_text: bool = True  # Load the Hugging Face weights of an HF text trunk.
    force_image_size: t.Count | None = None  # Image size in pixels, instead of the model's.
    force_context_length: t.Count | None = None  # Text length in tokens, instead of the model's.
    lock_image: bool = False  # Freeze the image trunk; its projection head still trains.
    lock_text: bool = False  # Freeze the text trunk; its projection head still trains.
    cache_features: bool = False
    """Run a locked trunk once over the data and train on its outputs (evaluation transform, no augmentation)."""
    cache_dir: str = "data/cache"  # Folder of cached trunk features.

    excludes = {("pretrained", "init_from"): "both bring every weight"}

    def check(self) -> None:
        if self.cache_features and not (self.lock_image or self.lock_text):
            raise UserError("--cache-features needs a locked trunk: add --lock-image, --lock-text or both")
        if self.pretrained is not None and self.model.startswith("local-dir:"):
            self.exclude("pretrained", "model", "a local-dir brings its own weights")
        if self.init_from is None:
            check_model(self.model, self.pretrained)
        else:  # ``model`` is what that run was trained from, and no trunks are set
            folder = export_folder(self.init_from)
            check_model(f"local-dir:{folder}", None)
            self.model = str(read_metadata(folder).get("model", f"local-dir:{folder}"))
            self.image_trunk = self.text_trunk = None


class ClipOptimizationConfig(t.Config):
    """Batches and AdamW of a CLIP run."""

    accum_freq: t.Count = 1
    """Forward passes a step. The loss treats all their pairs as one batch, with that batch's exact gradients: less
    memory, one more forward pass."""
    loss_batch_size: Pairs | None = None
    """Pairs of a step in the loss, of all processes, encoded --batch-size at a time; it need not be a multiple
    [--batch-size x --accum-freq x processes]"""
    proj_wd: t.NotNegative | None = None
    """Weight decay of the output projections, which carry the magnitude [as --wd]"""
    beta1: Moment = 0.9  # AdamW's first moment.
    beta2: Moment = 0.98  # AdamW's second moment.
    eps: t.Positive = 1e-6  # AdamW's epsilon.
    grad_clip_norm: t.Positive | None = None  # Clip the norm of the gradient to this [off]

    excludes = {("loss_batch_size", "accum_freq"): "both set the number of pairs in the loss"}


class ClipRunConfig(t.Config):
    """Evaluation and output of a CLIP run."""

    bank_size: t.Whole = BANK_SIZE
    """Training captions (or images) with which the last evaluation corrects the untrained direction; 0: none."""
    report: bool = True  # Write report.html at the end: numbers, curves, best and worst retrievals.
    val_steps: t.Count | None = None  # Steps between validations of both directions [an epoch]
    compare: list[str] | None = None  # Finished runs to compare this one with at the end.


class TrainConfig(ClipRunConfig, RunConfig, DeviceConfig, ClipOptimizationConfig, OptimizationConfig, ModelConfig,
                  ZeroShotConfig, ImageFilesConfig, DataConfig, LossConfig):  # fmt: skip
    """Train a CLIP whose embedding norms may carry relevance, and compare both retrieval directions.

    Examples:
      mmclip train --loss asym-i2t --norm qnorm
          the built-in scenes (configs/scenes.yaml), a minute and a half on a CPU
      mmclip train --config flickr8k_heads --train-data DIR/flickr8k --norm cosine
          heads on two frozen pretrained trunks, half a minute once features are cached

    A direction assigns the roles: in i2t the image is the query and texts are the documents, in t2i the reverse.
    Several GPUs: torchrun --nproc-per-node 8 -m mmclip train --config coco_vitb32 --train-data 'COCO/train/{0..59}.tar'
    """

    has_config_file = True
    most_used = "train_data val_data model pretrained loss norm epochs batch_size lr name resume config"

    def check(self) -> None:
        if self.resume == "latest" and self.name is None:
            raise UserError("--resume latest needs --name, the run to continue")
        for name, why in (
            ("zeroshot_data", "its numbers go into results.json"),
            ("measure_start", "it evaluates the model"),
        ):
            if self.is_set(name) and self.val_data == "none":
                raise UserError(f"{self.as_flag(name)} with --val-data none: {why}, which needs evaluation data")

    @classmethod
    def default_file(cls, flags: Mapping[str, Any]) -> Path | None:
        """With no data flags the built-in scenes and the settings tuned for them."""
        return CONFIGS / "scenes.yaml" if str(flags.get("train_data", SCENES)).startswith("builtin:") else None

    def joint_batch(self, ranks: int) -> int:
        """Pairs that the loss treats as one batch, of all processes."""
        return self.loss_batch_size or self.batch_size * self.accum_freq * ranks


class EncodeConfig(DeviceConfig, ImageFilesConfig):
    """Model and data to encode, and the query bank."""

    model: str | None = None
    """Model: a run's folder, its model/ folder, local-dir:FOLDER, an open_clip model name, or a model config JSON."""
    pretrained: str | None = None  # Weights for a model name or JSON: an open_clip tag or a checkpoint file.
    data: str = SCENES  # Data to encode: a folder in clip-benchmark's layout, shards, a CSV, or builtin:…
    split: str | None = None  # Split of a folder [test, else val]
    bank: str | None = None
    """Query bank: training data whose captions (or images) correct every direction whose opposite was trained. With
    saved embeddings another file of those; 'transductive' is the evaluation's own, which a real search lacks."""
    bank_split: str | None = None  # Split of the bank's folder [train]
    bank_size: t.Count = BANK_SIZE  # Captions (or images) drawn from the bank.
    batch_size: t.Count = 64  # Images and captions a batch.
    precision: Precision = "fp32"

    needs = {"pretrained": "model"}


class EmbedConfig(EncodeConfig):
    """Encode a data set once: raw embeddings, ids, relevance and the model's scoring in one file.

    Examples:
      mmclip embed --model logs/demo-scenes-seed0/qnorm --bank builtin:scenes --output scenes.safetensors
          the built-in scenes, with the log-evidence that corrects t2i, from 2,000 training captions
      mmclip embed --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k --output flickr8k.npz
          any open_clip model on your own data, for numpy

    With --bank the file also holds the log-evidence of every candidate: one more dimension of an index, which ranks the
    direction that was not trained (docs/serving.md).
    """

    output: str | None = None  # File to write, .safetensors or .npz.

    most_used = "model pretrained data split bank output"
    required = {
        "model": "a run's folder, an open_clip model name or a model config JSON",
        "output": "a file ending in .safetensors or .npz",
    }

    def check(self) -> None:
        path = Path(str(self.output))
        if path.is_dir():
            raise UserError(f"{self.as_flag('output')}: a folder of that name exists")
        if path.suffix not in EMBEDDING_SUFFIXES:
            raise UserError(f"{self.as_flag('output')}: a file ending in {' or '.join(EMBEDDING_SUFFIXES)} is expected")


class EvaluateConfig(VerdictConfig, ZeroShotConfig, EncodeConfig):
    """Evaluate a model in both retrieval directions under every scoring, with magnitudes, and compare runs.

    Examples:
      mmclip evaluate --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k --output logs/zero-shot
          any open_clip model on your own data; --model RUN for a run of mmclip train
      D=logs/demo-scenes-seed0; mmclip evaluate --compare $D/baseline $D/qnorm --control $D/control --plot tradeoff.png
          finished runs, nothing encoded again: was magnitude learned, is it useful, and what did it cost?

    Scorings: cosine, dot, qnorm, dnorm, and native, the normalization that the model was trained with (a plain CLIP's
    is cosine). A direction whose opposite was trained has two more: reversed, the trained scores read backwards, and,
    with --bank, corrected: those less what each candidate scores on average over the bank.
    """

    embeddings: str | None = None
    """Saved embeddings instead of a model: .safetensors or .npz, of mmclip embed or of any two encoders. Arrays image
    [N, D], text [M, D], image_ids, text_ids, text_image_ids."""
    distractors: list[str] | None = None
    """Candidates that match nothing, each kind a pool of its own: data sets, or blank, noise, blurred, shuffled
    (images), boilerplate, shuffled-words (captions)."""
    output: str | None = None  # Folder of results.json [evaluations/DATA-SPLIT in the run, else in logs]
    report: bool = True  # Write report.html beside results.json: a page with pictures.
    verbose: bool = False  # End with every table, not with a summary alone.
    compare: list[str] | None = None  # Finished runs on the same data to compare with.
    plot: str | None = None  # PNG file for the trade-off picture of the compared runs.
    block_bytes: t.Bytes = 64 * 2**20  # Working memory of the ranking in bytes, beside the embeddings.

    most_used = "model pretrained data split embeddings bank compare control baseline output"

    def check(self) -> None:
        if self.model is None and self.embeddings is None and not self.compare:
            raise UserError("nothing to do: give --model, --embeddings, or --compare with finished runs")
        if self.zeroshot_data is not None and self.model is None and self.embeddings is None:
            raise UserError("--zeroshot-data needs --model: finished runs are compared as they are")
        for name in ("model", "pretrained", "data", "split", "distractors", "bank_split", "zeroshot_data"):
            if self.embeddings is not None and self.is_set(name):
                self.exclude("embeddings", name, "saved embeddings are what they are; mmclip embed encodes again")


class DiagnoseConfig(EvaluateConfig):
    """Diagnose a model's raw embeddings: norms, Cohen's d and AUC of relevance, hubness, anisotropy, Fisher numbers.

    Examples:
      mmclip diagnose --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k --output logs/zero-shot
          what the norms of a plain CLIP carry, without training
      mmclip diagnose --model RUN --data DIR/flickr8k --distractors boilerplate blank noise --control CONTROL
          against captions and images that match nothing, and against the run whose norms no loss used
    """

    fisher: bool = True  # Condition numbers of the four Fisher matrices: a minute and more at D = 512.


class ReportConfig(VerdictConfig):
    """Write one HTML page for one run, or for several on the same data; it needs no network and no other file.

    Examples:
      mmclip report --runs logs/demo-scenes-seed0/qnorm
          writes logs/demo-scenes-seed0/qnorm/report.html
      D=logs/demo-scenes-seed0; mmclip report --runs $D/baseline $D/qnorm --control $D/control --baseline $D/baseline
          several runs, differences to the first, and the verdict
    """

    runs: list[str] | None = None  # Finished runs: folders, or a results.json each, compared with the first.
    output: str | None = None  # The page [report.html in the run's folder; of several runs, beside the first]

    required = {"runs": "nothing to report without finished runs"}
