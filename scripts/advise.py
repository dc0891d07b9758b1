#!/usr/bin/env python3
"""Which side to normalize for a model and its data, by a short trial on frozen vectors; --help says how.

python scripts/advise.py --model DIR/all-MiniLM-L6-v2 --data DIR/scifact --document-length 64
"""

from mmclip.config.advise import parse_advise
from mmclip.config.flags import run_script


def main() -> None:
    settings = parse_advise()
    from mmclip.commands.advise import advise  # after the flags are known to be right

    advise(settings)


if __name__ == "__main__":
    run_script(main)
