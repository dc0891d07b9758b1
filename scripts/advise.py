#!/usr/bin/env python3
"""mmclip advise, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["advise", *sys.argv[1:]])
