#!/usr/bin/env python3
"""mmclip train-text, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["train-text", *sys.argv[1:]])
