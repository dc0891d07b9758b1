"""All cases one after the other: laid out, damaged, run, checked, counted."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections import defaultdict
from pathlib import Path

from fuzz_inputs import FLAGS, KINDS, Kind, keep_checkpoints, make_data
from fuzz_mutations import damage
from fuzz_run import Outcome, import_everything, run_case
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def run_all(arguments: argparse.Namespace, root: Path) -> int:
    """Make the good inputs below ``root`` and run all cases; 1 if any was not right."""
    import_everything()
    good, case = root / "good", root / "case"
    good.mkdir()
    make_data(good)

    def run(kind: Kind) -> Outcome:
        argv, sized = [*FLAGS, *kind.flags], kind.name in ("model", "export")
        return run_case(root, case, argv, seconds=arguments.timeout, gigabytes=arguments.memory, may_need_memory=sized)

    def require_good(kind: Kind) -> None:
        _lay_out(kind, kind.targets[0], good, case)
        outcome = run(kind)
        if outcome.faults or outcome.code:
            sys.exit(f"the {kind.name} case fails undamaged: {outcome}\n{(root / 'stderr').read_text()}")

    require_good(KINDS[0])
    keep_checkpoints(case / "logs" / "run", good)
    kinds = [kind for kind in KINDS if kind.name in arguments.kinds]
    for kind in kinds:
        require_good(kind)
    files = sorted(p for p in good.rglob("*") if p.is_file())
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    # No refresh from a thread: it might hold a lock just when a case is forked.
    with Progress(auto_refresh=False, disable=not sys.stderr.isatty(), console=Console(stderr=True)) as bar:
        numbers = range(arguments.cases) if arguments.only is None else [arguments.only]
        for number in bar.track(numbers, description="cases"):
            kind, rng = kinds[number % len(kinds)], random.Random(f"{arguments.seed} {number}")
            target = rng.choice(kind.targets)
            _lay_out(kind, target, good, case)
            damage(case / target, files, rng)
            outcome = run(kind)
            outcomes[kind.name].append(outcome)
            if outcome.faults or arguments.only is not None:
                _keep(root, case, arguments.output / f"seed{arguments.seed}-case{number}-{kind.name}", target, outcome)
            if outcome.faults or arguments.verbose:
                last = (root / "stderr").read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
                print(f"{number} {target}: {outcome}: {last[:300]!a}", file=sys.stderr)
            bar.refresh()
    _print_summary(outcomes)
    failed = sum(bool(o.faults) for found in outcomes.values() for o in found)
    if failed:
        print(f"{failed} cases are not right; their inputs and output are in {arguments.output}", file=sys.stderr)
    return int(failed > 0)


def _lay_out(kind: Kind, target: str, good: Path, case: Path) -> None:
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    for name in {"config.yaml", "model.json", target.split("/")[0], *kind.inputs}:
        if (good / name).is_dir():
            shutil.copytree(good / name, case / name)
        else:
            shutil.copy(good / name, case / name)


def _keep(root: Path, case: Path, place: Path, target: str, outcome: Outcome) -> None:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(case, place, symlinks=True)
    for name in ("stdout", "stderr"):
        shutil.copy(root / name, place / f"{name}.txt")
    (place / "why.txt").write_text(f"{target} is damaged\n{outcome}\n", encoding="utf-8")


def _print_summary(outcomes: dict[str, list[Outcome]]) -> None:
    table = Table("kind", "cases", "exit 0", "exit 2", "failures", "slowest, s", "most MB")
    everything = [o for found in outcomes.values() for o in found]
    for name, found in [*outcomes.items(), ("all", everything)]:
        right = [o.code for o in found if not o.faults]
        counts = len(found), right.count(0), right.count(2), len(found) - len(right)
        most = f"{max(o.seconds for o in found):.1f}", f"{max(o.megabytes for o in found):.0f}"
        table.add_row(name, *map(str, counts), *most)
    Console().print(table)
