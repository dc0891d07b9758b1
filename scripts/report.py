#!/usr/bin/env python3
"""mmclip report, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
