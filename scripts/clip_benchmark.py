#!/usr/bin/env python3
"""mmclip clip-benchmark, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where this file has the package's name
    main(["clip-benchmark", *sys.argv[1:]])
