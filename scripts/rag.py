#!/usr/bin/env python3
"""Ask a local reader with the documents that each scoring retrieves: exact match and token F1.

python scripts/rag.py --model logs/my-text-run --data DIR/triviaqa --reader google/flan-t5-large
"""

from mmclip.config.flags import run_script
from mmclip.config.rag import parse_rag


def main() -> None:
    settings = parse_rag()
    from mmclip.commands.rag import run_rag  # after the flags are known to be right

    run_rag(settings)


if __name__ == "__main__":
    run_script(main)
