"""Data sets of a command: training data, evaluation data with distractors, query bank."""

from __future__ import annotations

from pathlib import Path

from mmclip.config import EncodeConfig, EvaluateConfig, TrainConfig
from mmclip.data.distractors import parse_distractors
from mmclip.data.image_text import ImageTextData
from mmclip.data.shards import builtin_folder, find_split, is_folder, open_data
from mmclip.errors import UserError, printable

DISTRACTORS = "distractors"  # a split whose images and captions match nothing
Named = dict[str, ImageTextData]  # sets of distractors by the name of their pool


def open_training(settings: TrainConfig) -> tuple[ImageTextData, ImageTextData | None, Named]:
    """Open training data, evaluation data (or None) and the distractors of the evaluation data.

    Without --val-data the evaluation data are the test (else val) split of the training folder, if there is one; with
    --val-holdout they are the last training images.
    """
    data = _open(settings, settings.train_data, settings.train_split, "train")
    val: ImageTextData | None = None
    distractors: Named = {}
    if settings.val_holdout is not None:
        n, batch = settings.val_holdout, settings.joint_batch(1)
        if len(data) - n < batch:
            raise UserError(
                f"--val-holdout {n}: of the {len(data)} images of {printable(data.path)} it leaves "
                f"{max(len(data) - n, 0)} to train on, less than a batch of {batch}"
            )
        data, val = data.holdout(n)
    elif settings.val_data is not None:
        if settings.val_data != "none":
            val = _open(settings, settings.val_data, settings.val_split, "eval")
            distractors = _distractors(settings, settings.val_data)
    else:
        root = builtin_folder(settings.train_data) or Path(settings.train_data)
        folder = find_split(root, settings.val_split, "eval") if is_folder(root) else None
        if folder is not None and folder.name != data.split:
            val = _open(settings, settings.train_data, folder.name, "eval")
            distractors = _distractors(settings, settings.train_data)
    if val is None and (settings.zeroshot_data is not None or settings.measure_start):
        flag, path = "--measure-start" if settings.measure_start else "--zeroshot-data", printable(data.path)
        needed = "has no evaluation split: give --val-data or --val-holdout"
        raise UserError(f"{flag} needs evaluation data, and {path} {needed}")
    return _trained_on(settings, data), val, distractors


def _trained_on(settings: TrainConfig, data: ImageTextData) -> ImageTextData:
    """Apply --train-num-samples, --train-fraction and --permute-pairs."""
    if settings.train_num_samples is not None:
        if settings.train_num_samples > len(data):
            limit, path = settings.train_num_samples, printable(data.path)
            raise UserError(f"--train-num-samples {limit}: {path} holds only {len(data)} images")
        data = data.subset(range(settings.train_num_samples))
    if settings.train_fraction is not None:
        n, batch = round(settings.train_fraction * len(data)), settings.joint_batch(1)
        if n < batch:
            raise UserError(
                f"--train-fraction {settings.train_fraction:g}: {n} of the {len(data)} images of "
                f"{printable(data.path)}, less than a batch of {batch}"
            )
        data = data.subset(range(n))
    if settings.permute_pairs:
        if len(data) < 2:
            raise UserError(f"--permute-pairs: {len(data)} image: there is no other one to take captions from")
        data = data.permute(settings.seed)
    return data


def open_evaluation(settings: EncodeConfig) -> tuple[ImageTextData, Named]:
    """Open evaluation data, with its own distractors and those of --distractors."""
    data = _open(settings, settings.data, settings.split, "eval")
    named = _distractors(settings, settings.data)
    names = settings.distractors if isinstance(settings, EvaluateConfig) else None
    for source in parse_distractors(names or [])[1]:
        extra = _open(settings, source, None, "eval")
        if extra.fingerprint() == data.fingerprint():
            raise UserError(f"--distractors {printable(source)}: the evaluation data themselves, which match something")
        named[f"{Path(source).name}-{extra.split}".strip("-")] = extra
    return data, named


def open_bank(settings: EncodeConfig, evaluated: ImageTextData) -> ImageTextData:
    """Open the data of --bank (UserError where they are the evaluation data themselves)."""
    assert settings.bank is not None
    data = _open(settings, settings.bank, settings.bank_split, "train")
    if data.fingerprint() == evaluated.fingerprint():
        raise UserError(
            f"--bank {printable(settings.bank)}: the evaluation data themselves ({printable(data.split, 60)}); take "
            "training data, or name it: --bank transductive"
        )
    return data


def _open(settings: TrainConfig | EncodeConfig, source: str, split: str | None, purpose: str) -> ImageTextData:
    columns = settings.csv_img_key, settings.csv_caption_key, settings.csv_separator
    return open_data(source, split, purpose, settings.dataset_type, *columns)


def _distractors(settings: TrainConfig | EncodeConfig, source: str) -> Named:
    root = builtin_folder(source) or Path(source)
    return {DISTRACTORS: _open(settings, source, DISTRACTORS, "eval")} if is_folder(root / DISTRACTORS) else {}
