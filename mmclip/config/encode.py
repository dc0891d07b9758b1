"""The settings of every script that encodes a data set with a model, and may draw a bank: evaluate.py, embed.py."""

from __future__ import annotations

import dataclasses

from mmclip.config.clip import BANK_SIZE, MODEL, PRECISIONS, RUN
from mmclip.config.data import DATA, SCENES
from mmclip.config.flags import flag
from mmclip.errors import UserError


@dataclasses.dataclass
class EncodeConfig:
    """The flags that these scripts share."""

    model: str | None = flag(
        None,
        MODEL,
        "a run's folder, its model/ folder, local-dir:FOLDER, an open_clip model name, a model config JSON, or a "
        "checkpoint file whose sizes leave one architecture",
    )
    pretrained: str | None = flag(None, MODEL, "an open_clip tag or a checkpoint file, for a model name or JSON")
    data: str = flag(SCENES, DATA, "what to encode: a folder in clip-benchmark's layout, shards, a CSV, or builtin:…")
    split: str | None = flag(None, DATA, "split of a folder [test, else val]")
    dataset_type: str = flag("auto", DATA, "how to read the data", choices=("auto", "webdataset", "csv"))
    csv_img_key: str = flag("filepath", DATA, "CSV column of image paths")
    csv_caption_key: str = flag("title", DATA, "CSV column of captions")
    csv_separator: str = flag("\t", DATA, "CSV separator")
    bank: str | None = flag(
        None,
        DATA,
        "training data, the captions (or images) of which correct every direction whose opposite was trained; with "
        "saved embeddings another file of those; 'transductive': the evaluation's own, which a real search lacks",
        metavar="DATA",
    )
    bank_split: str | None = flag(None, DATA, "split of the bank's folder [train]")
    bank_size: int = flag(BANK_SIZE, DATA, "captions (or images) drawn from the bank", metavar="N")
    batch_size: int = flag(64, RUN, "images and captions a batch", metavar="B")
    workers: int = flag(2, RUN, "processes that read and decode images", metavar="N")
    precision: str = flag("fp32", RUN, "autocast of the encoders; scores are always float32", choices=PRECISIONS)
    device: str = flag("auto", RUN, "auto, cpu, cuda or cuda:N")
    seed: int = flag(0, RUN, "of everything that is drawn: the bank, the bootstrap, distractors")

    def __post_init__(self) -> None:
        self.require_at_least(batch_size=1, workers=0, bank_size=1, seed=0)
        if self.pretrained is not None and self.model is None:
            raise UserError(f"--pretrained {self.pretrained} needs --model, the name of its architecture")

    def require_at_least(self, **lowest: int) -> None:
        """Errors: UserError naming the flag and what it was given."""
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {low}")
