#!/usr/bin/env python3
"""mmclip rag, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["rag", *sys.argv[1:]])
