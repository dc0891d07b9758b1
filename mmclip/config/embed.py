"""The settings of embed.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mmclip.config.clip import RUN
from mmclip.config.encode import EncodeConfig
from mmclip.config.flags import flag, parse
from mmclip.errors import UserError

SUFFIXES = (".safetensors", ".npz")  # mmclip.array_files has them too; it is slow to import


@dataclasses.dataclass
class EmbedConfig(EncodeConfig):
    """Every flag of embed.py."""

    output: str | None = flag(None, RUN, "the file to write, .safetensors or .npz", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None:
            raise UserError("--model is needed: a run's folder, an open_clip model name or a model config JSON")
        if self.output is None or Path(self.output).suffix not in SUFFIXES:
            given = "nothing" if self.output is None else repr(self.output)
            raise UserError(f"--output {given}: a file ending in {' or '.join(SUFFIXES)} is expected")
        if Path(self.output).is_dir():
            raise UserError(f"--output {self.output}: a folder of that name is there")


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


def parse_embed(argv: Sequence[str] | None = None) -> EmbedConfig:
    """The command line of embed.py. Errors: UserError."""
    return parse(EmbedConfig, argv, DESCRIPTION, EXAMPLES)
