#!/usr/bin/env python3
"""mmclip demo, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["demo", *sys.argv[1:]])
