"""The settings of a training run: they check themselves, build nothing and import nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmclip.config.data import SCENES, DataConfig
from mmclip.config.flags import flag, parse
from mmclip.config.loss import LossConfig, steps_or_fraction
from mmclip.config.model_config import CONFIGS, check_model, export_folder, read_metadata
from mmclip.errors import UserError, printable, require

PRECISIONS = ("auto", "fp32", "amp_bf16", "amp_bfloat16")
# What a run may be continued with on purpose: how it goes on, not what it is
CHANGEABLE = ("batch_size", "accum_freq", "loss_batch_size", "lr", "gamma_lr", "wd", "proj_wd", "beta1", "beta2",
              "eps", "warmup", "grad_clip_norm", "precision", "epochs", "max_steps")  # fmt: skip

BANK_SIZE = 2000  # items over which the zero points of a direction that was not trained are estimated
MODEL, OPTIMIZATION, RUN = "model", "optimization", "run"


@dataclasses.dataclass
class TrainConfig(DataConfig, LossConfig):
    """Every flag of train_clip.py, named as open_clip names it wherever it has one."""

    model: str = flag("ViT-B-32", MODEL, "an open_clip model name, a model config JSON, or local-dir:FOLDER")
    pretrained: str | None = flag(None, MODEL, "an open_clip tag or a checkpoint file; default: random weights")
    init_from: str | None = flag(
        None,
        MODEL,
        "start from a finished run: its folder, or its model folder. Architecture, weights, transform and tokenizer "
        "are its own, whatever --model, --image-trunk and --text-trunk or a config say; alpha is set so that its "
        "effective scale stays, unless --logit-scale-init says another",
        metavar="RUN",
    )
    image_trunk: str | None = flag(None, MODEL, "weights for a timm image trunk: safetensors or .pt", metavar="FILE")
    text_trunk: str | None = flag(None, MODEL, "a Hugging Face folder for the text trunk and tokenizer", metavar="DIR")
    pretrained_image: bool = flag(False, MODEL, "load timm's own pretrained weights into a timm image trunk")
    pretrained_text: bool = flag(
        True,
        MODEL,
        "load the Hugging Face weights of an HF text trunk; --no-pretrained-text starts it from random weights",
    )
    force_image_size: int | None = flag(None, MODEL, "override the model's image size", type=int, metavar="PX")
    force_context_length: int | None = flag(None, MODEL, "override the text length", type=int, metavar="TOKENS")
    lock_image: bool = flag(False, MODEL, "freeze the image trunk; its projection head still trains")
    lock_text: bool = flag(False, MODEL, "freeze the text trunk; its projection head still trains")
    cache_features: bool = flag(
        False,
        MODEL,
        "run a locked trunk once over the data and train on its outputs "
        "(evaluation transform, no augmentation); kept in --cache-dir",
    )
    cache_dir: str = flag("data/cache", MODEL, "where cached trunk features are kept", metavar="DIR")
    grad_checkpointing: bool = flag(False, MODEL, "recompute activations in the backward pass: less memory, more time")
    torchcompile: bool = flag(False, MODEL, "compile the towers with torch.compile")
    fsdp: bool = flag(
        False,
        MODEL,
        "share the towers' weights, gradients and moments out over torchrun's processes (FSDP2): for models too large "
        "to be trained on one device; checkpoints stay whole",
    )

    epochs: int = flag(
        32, OPTIMIZATION, "passes over the images; one caption of each image is drawn a pass", metavar="N"
    )
    max_steps: int | None = flag(
        None, OPTIMIZATION, "stop after this many steps, whatever the epochs", type=int, metavar="N"
    )
    accum_freq: int = flag(
        1,
        OPTIMIZATION,
        "forward passes per step: the loss sees all their pairs as one batch, with that batch's exact gradients; "
        "less memory, one more forward pass",
        metavar="K",
    )
    loss_batch_size: int | None = flag(
        None,
        OPTIMIZATION,
        "the same as a number: pairs that the loss sees a step, of all processes together, encoded --batch-size at a "
        "time; it need not be a multiple [--batch-size x --accum-freq x processes]",
        type=int,
        metavar="N",
    )
    lr: float = flag(5e-4, OPTIMIZATION, "peak learning rate of the towers and of alpha")
    gamma_lr: float = flag(
        1e-2,
        OPTIMIZATION,
        "peak learning rate of gamma (at the towers' it cannot move); 0 holds it at --gamma-init",
    )
    wd: float = flag(0.2, OPTIMIZATION, "weight decay of matrices; biases, norms, alpha and gamma have none")
    proj_wd: float | None = flag(
        None,
        OPTIMIZATION,
        "weight decay of the output projections, which carry the magnitude [as --wd]",
        type=float,
        metavar="WD",
    )
    beta1: float = flag(0.9, OPTIMIZATION, "AdamW's first moment")
    beta2: float = flag(0.98, OPTIMIZATION, "AdamW's second moment")
    eps: float = flag(1e-6, OPTIMIZATION, "AdamW's epsilon")
    warmup: float = flag(
        0.1, OPTIMIZATION, "warm-up: a number of steps, or a fraction of the run below 1", type=steps_or_fraction
    )
    grad_clip_norm: float | None = flag(None, OPTIMIZATION, "clip the gradient's norm", type=float, metavar="X")
    precision: str = flag(
        "auto",
        OPTIMIZATION,
        "auto is bf16 autocast on CUDA and float32 on CPU; scores are always float32",
        choices=PRECISIONS,
    )
    device: str = flag("auto", OPTIMIZATION, "auto, cpu, cuda or cuda:N")

    logs: str = flag("logs", RUN, "folder of runs", metavar="DIR")
    name: str | None = flag(None, RUN, "name of the run's folder [time, loss and norm]")
    seed: int = flag(0, RUN, "everything random follows from it")
    resume: str | None = flag(
        None,
        RUN,
        "continue a run: a checkpoint file, or 'latest' (with --name); 'latest' starts over where a run was stopped "
        "before its first checkpoint",
    )
    may_change: list[str] | None = flag(
        None,
        RUN,
        "settings that --resume may find changed, such as lr epochs: the run goes on with the new ones, and is "
        "then not the run that it was",
        type=lambda name: name.replace("-", "_"),
        choices=CHANGEABLE,
        nargs="*",
        metavar="NAME",
    )
    bank_size: int = flag(
        BANK_SIZE,
        RUN,
        "training captions (or images) that the last evaluation corrects the untrained direction with; 0: none",
        metavar="N",
    )
    measure_start: bool = flag(
        False,
        RUN,
        "evaluate the model before the first step, too, Fisher condition numbers included, into start.json: what it "
        "knew before, and whether length may help",
    )
    report: bool = flag(True, RUN, "write report.html at the end: numbers, curves, best and worst retrievals")
    keep_checkpoints: int = flag(3, RUN, "how many of a run's newest checkpoints to keep", metavar="N")
    strict: bool = flag(False, RUN, "an alarm (a direction that dies, a loss that stands still, …) ends the run")
    benchmark: int | None = flag(
        None,
        RUN,
        "take N steps after a few to warm up, print samples a second, MFU, peak memory and where the time goes, and "
        "leave: no run folder, no validation",
        type=int,
        metavar="N",
    )
    val_steps: int | None = flag(None, RUN, "validate both directions every N steps [an epoch]", type=int, metavar="N")
    save_steps: int | None = flag(None, RUN, "write a checkpoint every N steps [an epoch]", type=int, metavar="N")
    log_every_n_steps: int = flag(10, RUN, "steps between lines of metrics.jsonl", metavar="N")
    report_to: str = flag("none", RUN, "'tensorboard' also writes TensorBoard files", choices=("none", "tensorboard"))
    compare: list[str] | None = flag(
        None, RUN, "finished runs to set beside this one at the end", type=str, nargs="*", metavar="RUN"
    )

    def __post_init__(self) -> None:
        self.check_loss()
        self.check_data()
        self._start_from_run()
        self._check_numbers()
        self._check_combinations()

    def _start_from_run(self) -> None:
        """With --init-from, ``model`` is what that run was trained from and trunks are nobody's. Errors: UserError."""
        if self.init_from is None:
            return
        if self.pretrained is not None:
            given = f"--pretrained {printable(self.pretrained)} beside --init-from {printable(self.init_from)}"
            raise UserError(f"{given}: both bring every weight; give one of the two")
        folder = export_folder(self.init_from)
        local = f"local-dir:{folder}"
        check_model(local, None)
        self.model = str(read_metadata(folder).get("model", local))
        self.image_trunk = self.text_trunk = None

    def _check_numbers(self) -> None:
        at_least_one = (
            "accum_freq",
            "loss_batch_size",
            "keep_checkpoints",
            "epochs",
            "max_steps",
            "benchmark",
            "val_steps",
            "save_steps",
            "log_every_n_steps",
            "force_image_size",
            "force_context_length",
        )
        above_zero = ("lr", "eps", "grad_clip_norm")
        not_negative = ("gamma_lr", "bank_size", "wd", "proj_wd", "warmup", "seed")
        for names, valid, ok in (
            (at_least_one, "a whole number of at least 1", lambda v: v >= 1),
            (above_zero, "a number above 0", lambda v: v > 0),
            (not_negative, "a number of at least 0", lambda v: v >= 0),
            (("beta1", "beta2"), "a number from 0 to below 1", lambda v: 0 <= v < 1),
        ):
            require(self, names, valid, ok)

    def _check_combinations(self) -> None:
        if self.loss_batch_size is not None and self.accum_freq != 1:
            raise UserError(
                f"--loss-batch-size {self.loss_batch_size} beside --accum-freq {self.accum_freq}: both say how many "
                "pairs the loss sees; give one of the two"
            )
        if self.loss_batch_size == 1:
            raise UserError("--loss-batch-size 1: a single pair has no rival; valid: 2 or more")
        if self.cache_features and not (self.lock_image or self.lock_text):
            raise UserError("--cache-features needs a locked trunk: add --lock-image, --lock-text or both")
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name or "\\" in self.name):
            raise UserError(f"--name {printable(self.name)!r}: a plain folder name is expected, without slashes")
        if self.may_change and not self.resume:
            raise UserError(f"--may-change {' '.join(self.may_change)} is for --resume")
        if self.benchmark is not None and self.resume:
            raise UserError(f"--benchmark {self.benchmark} beside --resume: it measures and keeps nothing")
        if self.resume == "latest" and self.name is None:
            raise UserError("--resume latest needs --name, the run to continue")
        if self.pretrained and self.model.startswith("local-dir:"):
            raise UserError(
                f"--pretrained {printable(self.pretrained)} beside --model {printable(self.model)}: a "
                "local-dir brings its own weights; give one of the two"
            )
        if self.init_from is None:
            check_model(self.model, self.pretrained)
        for path, name in ((self.image_trunk, "--image-trunk"), (self.text_trunk, "--text-trunk")):
            if path is not None and not Path(path).exists():
                raise UserError(f"{name} {printable(path)}: no such file or folder")
        if self.fsdp and self.torchcompile:
            raise UserError("--fsdp with --torchcompile: a compiled tower cannot be shared out; give one of the two")
        if self.measure_start and self.val_data == "none":
            raise UserError("--measure-start evaluates the model before the first step: it needs evaluation data")

    def joint_batch(self, ranks: int) -> int:
        """Pairs that the loss sees in a step, of all processes."""
        return self.loss_batch_size or self.batch_size * self.accum_freq * ranks

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


DESCRIPTION = """Train a CLIP whose embedding length may carry relevance, and compare both retrieval directions.

A direction assigns the roles: in i2t the image is the query and texts are the documents, in t2i the reverse.
--norm acts on roles: cosine divides out both lengths, qnorm the query's, dnorm the document's, dot neither.
With no data flags it trains on built-in scenes (configs/scenes.yaml), drawn on first use, no download."""

EXAMPLES = """examples:
  python scripts/train_clip.py --loss asym-i2t --norm qnorm
      the built-in scenes, a minute and a half on a CPU

  python scripts/train_clip.py --config flickr8k_heads --train-data DIR/flickr8k --loss sym --norm cosine
      projection heads on two frozen pretrained trunks, half a minute on a CPU once features are cached

  torchrun --nproc-per-node 8 -- scripts/train_clip.py --config coco_vitb32 --loss asym-i2t --norm qnorm \\
      --train-data 'COCO/train/{0..59}.tar' --val-data COCO --val-split val
      the GPU recipe of the paper's CLIP section"""


def _scenes_by_default(flags: dict[str, Any]) -> Path | None:
    """With no data flags the built-in scenes and the settings tuned for them."""
    if str(flags.get("train_data", SCENES)).startswith("builtin:"):
        return CONFIGS / "scenes.yaml"
    return None


def parse_train(argv: Sequence[str] | None = None) -> TrainConfig:
    """The command line of train_clip.py. Errors: UserError, before any model or data is touched."""
    return parse(TrainConfig, argv, DESCRIPTION, EXAMPLES, CONFIGS, _scenes_by_default)
