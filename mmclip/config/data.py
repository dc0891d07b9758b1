"""The settings of the data: what a run is trained, validated and tested on. A part of every training run's settings."""

from __future__ import annotations

import argparse
import dataclasses

from mmclip.config.augmentation import parse_aug_cfg
from mmclip.config.flags import flag
from mmclip.errors import UserError, require

SCENES = "builtin:scenes"
DATA = "data"


def _key_value(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return text


@dataclasses.dataclass
class DataConfig:
    """Which pictures and captions, how many of them, and how they are read."""

    train_data: str = flag(
        SCENES,
        DATA,
        "training data: a shard pattern 'DIR/{0..5}.tar', a folder in clip-benchmark's layout (ROOT or "
        "ROOT/SPLIT), a CSV, builtin:scenes or builtin:scenes-uninformative (both drawn once, into the folder that the "
        "environment names as MMCLIP_DATA, else data/)",
    )
    val_data: str | None = flag(
        None,
        DATA,
        "data for validation and the final evaluation; default: --train-data's own "
        "evaluation split where it has one, 'none' for no validation",
    )
    train_split: str | None = flag(None, DATA, "split of a folder to train on [train]")
    val_split: str | None = flag(None, DATA, "split of a folder to evaluate on [test, else val]")
    dataset_type: str = flag("auto", DATA, "how to read the data", choices=("auto", "webdataset", "csv"))
    val_holdout: int | None = flag(
        None,
        DATA,
        "validate and evaluate on the last N training images, which are then not trained on: to choose settings "
        "without a look at the real evaluation data",
        type=int,
        metavar="N",
    )
    train_fraction: float | None = flag(
        None,
        DATA,
        "train on the first share F of the images (0 < F <= 1), of those that --val-holdout leaves",
        type=float,
        metavar="F",
    )
    train_num_samples: int | None = flag(None, DATA, "train on the first N images only", type=int, metavar="N")
    permute_pairs: bool = flag(
        False,
        DATA,
        "a null: every training image gets the captions of another one, so that there is nothing to learn; what is "
        "still found is an artefact",
    )
    zeroshot_data: str | None = flag(
        None,
        DATA,
        "pictures of classes, on which zero-shot accuracy is measured at the end: a folder in clip-benchmark's layout, "
        "or builtin:scenes-classes",
    )
    zeroshot_split: str | None = flag(None, DATA, "split of that folder [test, else val]")
    csv_img_key: str = flag("filepath", DATA, "CSV column of image paths")
    csv_caption_key: str = flag("title", DATA, "CSV column of captions")
    csv_separator: str = flag("\t", DATA, "CSV separator")
    batch_size: int = flag(64, DATA, "images per step and process (with --accum-freq: per forward pass)", metavar="B")
    keep_last: bool = flag(False, DATA, "train on the last, partial batch of an epoch too, instead of dropping it")
    workers: int = flag(2, DATA, "processes that read and decode images; the result does not depend on it", metavar="N")
    max_bad_samples: int | None = flag(
        None,
        DATA,
        "stop with an error when more training samples than this cannot be used; default: skip, count and name them",
        type=int,
        metavar="N",
    )
    aug_cfg: list[str] | None = flag(
        None,
        DATA,
        "training augmentation, open_clip's: scale=0.9,1 color_jitter=0.2 …; 'none=1' for the evaluation transform",
        type=_key_value,
        nargs="*",
        metavar="K=V",
    )

    def check_data(self) -> None:
        """Errors: UserError naming the flag and what it was given."""
        at_least_one = ("batch_size", "train_num_samples", "val_holdout")
        require(self, at_least_one, "a whole number of at least 1", lambda v: v >= 1)
        require(self, ("workers", "max_bad_samples"), "a number of at least 0", lambda v: v >= 0)
        require(self, ("workers",), "a whole number of at most 256", lambda v: v <= 256)
        require(self, ("train_fraction",), "a number above 0 and at most 1", lambda v: 0 < v <= 1)
        if self.train_fraction is not None and self.train_num_samples is not None:
            raise UserError(
                f"--train-fraction {self.train_fraction:g} beside --train-num-samples {self.train_num_samples}: both "
                "say how many images are trained on; give one of the two"
            )
        for name in ("val_data", "val_split"):
            if self.val_holdout is not None and getattr(self, name) is not None:
                raise UserError(
                    f"--val-holdout {self.val_holdout} beside --{name.replace('_', '-')} {getattr(self, name)}: the "
                    "held-out training images are what is evaluated on; give one of the two"
                )
        check_zeroshot(self.zeroshot_data, self.zeroshot_split)
        if self.zeroshot_data is not None and self.val_data == "none":
            raise UserError(
                "--zeroshot-data with --val-data none: its numbers go into results.json, which needs evaluation data"
            )
        parse_aug_cfg(self.aug_cfg)


def check_zeroshot(data: str | None, split: str | None) -> None:
    """Errors: UserError for a split of nothing."""
    if split is not None and data is None:
        raise UserError(f"--zeroshot-split {split} needs --zeroshot-data, whose split it is")
