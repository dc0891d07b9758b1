#!/usr/bin/env python3
"""mmclip evaluate-text, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["evaluate-text", *sys.argv[1:]])
