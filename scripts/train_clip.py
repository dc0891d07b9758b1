#!/usr/bin/env python3
"""mmclip train, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
