#!/usr/bin/env python3
"""mmclip study, from a checkout."""

import sys

from mmclip.cli import main

if __name__ == "__main__":
    main(["study", *sys.argv[1:]])
