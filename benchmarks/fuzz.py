#!/usr/bin/env python3
"""Damage every kind of input of a training run at random, and require that each run ends well.

Each case takes good tiny inputs (a config, a CSV, pictures, tars, a model, checkpoints of a real run), damages one of
them, and trains for two steps through the function that scripts/train_clip.py uses, in a process of its own. A case is
right when it ends in time with exit code 0 (trained to the last step, or said what it skipped) or 2 (one line that
starts with "error: "), shows no traceback, takes little memory, and changes nothing outside its log folder.

Cases that are not right are kept in --output with their inputs and output, and the exit code is then 1. The same
--seed gives the same cases.

  python benchmarks/fuzz.py --cases 60                 half a minute
  python benchmarks/fuzz.py --seed 7 --kinds tar csv   these inputs only
  python benchmarks/fuzz.py --seed 7 --only 123        one case again, kept with its output
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

KINDS = ("yaml", "csv", "picture", "tar", "folder", "model", "export", "pt", "safetensors", "resume")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the cases follow from it [0]")
    parser.add_argument("--cases", type=int, default=500, metavar="N", help="how many [500]")
    parser.add_argument("--timeout", type=float, default=60, metavar="S", help="seconds a case may take [60]")
    parser.add_argument("--memory", type=float, default=4, metavar="GB", help="memory a case may take [4]")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}"
    )
    parser.add_argument("--only", type=int, metavar="CASE", help="run this case alone and keep it")
    parser.add_argument("--verbose", action="store_true", help="say how each case ended")
    parser.add_argument("--output", type=Path, default=Path("fuzz-failures"), metavar="DIR", help="[fuzz-failures]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mmclip-fuzz-") as scratch:
        root = Path(scratch).resolve()
        # Whatever a library keeps for itself lands here too, where it is seen.
        for name in ("HOME", "TMPDIR"):
            (root / name).mkdir()
            os.environ[name] = str(root / name)
        tempfile.tempdir = None
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        from fuzz_cases import run_all  # after the environment is set: libraries read it when they are imported

        code = run_all(arguments, root)
    sys.exit(code)


if __name__ == "__main__":
    main()
