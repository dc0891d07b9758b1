"""The settings of embed.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mmclip.config import BANK_SIZE, DATA, MODEL, PRECISIONS, RUN, SCENES
from mmclip.errors import UsageError
from mmclip.flags import flag, parse

BANK = "bank"
SUFFIXES = (".safetensors", ".npz")  # mmclip.array_files has them too; it is slow to import


@dataclasses.dataclass
class EmbedSettings:
    """Every flag of embed.py."""

    model: str | None = flag(
        None,
        MODEL,
        "a run's folder, its model/ folder, local-dir:FOLDER, an open_clip model name or a model config JSON",
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
        BANK,
        "data whose captions (or images) the log-evidence of every candidate is estimated from, for the correction of "
        "every direction whose opposite was trained; take training data, never what is evaluated",
        metavar="DATA",
    )
    bank_split: str | None = flag(None, BANK, "split of the bank's folder [train]")
    bank_size: int = flag(BANK_SIZE, BANK, "captions (or images) drawn from it", metavar="N")
    batch_size: int = flag(64, RUN, "images and captions a batch", metavar="B")
    workers: int = flag(2, RUN, "processes that read and decode images", metavar="N")
    precision: str = flag("fp32", RUN, "autocast of the encoders", choices=PRECISIONS)
    device: str = flag("auto", RUN, "auto, cpu, cuda or cuda:N")
    output: str | None = flag(None, RUN, "the file to write, .safetensors or .npz", metavar="FILE")
    seed: int = flag(0, RUN, "of the bank's draw")

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 1), ("workers", 0), ("bank_size", 1), ("seed", 0)):
            if getattr(self, name) < low:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {low}")
        if self.model is None:
            raise UsageError("--model is needed: a run's folder, an open_clip model name or a model config JSON")
        if self.output is None or Path(self.output).suffix not in SUFFIXES:
            given = "nothing" if self.output is None else repr(self.output)
            raise UsageError(f"--output {given}: a file ending in {' or '.join(SUFFIXES)} is expected")
        if Path(self.output).is_dir():
            raise UsageError(f"--output {self.output}: a folder of that name is there")


DESCRIPTION = """Encode a data set once and write raw vectors, ids, relevance and the model's scoring to one file.

The vectors keep their lengths. With --bank the file also holds the log-evidence of every candidate, which is one more
dimension of an index and ranks the direction that was not trained (docs/serving.md)."""

EXAMPLES = """examples:
  python scripts/embed.py --model logs/demo-scenes-seed0/qnorm --data builtin:scenes --bank builtin:scenes \\
      --output scenes.safetensors
      the built-in scenes, with the evidence that corrects t2i, from 2,000 training captions

  python scripts/embed.py --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k --split val \\
      --output flickr8k.npz
      any open_clip model on your own data, for numpy

  python benchmarks/serving.py --embeddings scenes.safetensors
      what an index makes of them: flat, HNSW, int8, cosine-only"""


def parse_embed(argv: Sequence[str] | None = None) -> EmbedSettings:
    """The command line of embed.py. Errors: UsageError."""
    return parse(EmbedSettings, argv, DESCRIPTION, EXAMPLES)
