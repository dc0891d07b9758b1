#!/usr/bin/env python3
"""mmclip diagnose, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["diagnose", *sys.argv[1:]])
