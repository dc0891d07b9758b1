#!/usr/bin/env python3
"""mmclip sts, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["sts", *sys.argv[1:]])
