#!/usr/bin/env python3
"""mmclip embed, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["embed", *sys.argv[1:]])
