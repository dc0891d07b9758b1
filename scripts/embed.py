#!/usr/bin/env python3
"""Encode a data set once: raw vectors, ids, relevance and the model's scoring, in one .safetensors or .npz.

python scripts/embed.py --model logs/my-run --data builtin:scenes --output scenes.safetensors
"""

from mmclip.config.embed import parse_embed
from mmclip.config.flags import run_script


def main() -> None:
    settings = parse_embed()
    from mmclip.commands.embed import embed  # after the flags are known to be right

    embed(settings)


if __name__ == "__main__":
    run_script(main)
