"""The console command: mmclip COMMAND [flags]; scripts/ are the same commands from a checkout."""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from mmclip.errors import UserError, nearest, printable


class Command(NamedTuple):
    """module: of mmclip.commands, imported once the flags are right. config: its class; None: the module parses."""

    config: str | None
    module: str
    summary: str


COMMANDS = {
    "train": Command("TrainConfig", "train", "train a CLIP, and compare both retrieval directions"),
    "evaluate": Command("EvaluateConfig", "evaluate", "evaluate a CLIP under every scoring, or compare finished runs"),
    "diagnose": Command("DiagnoseConfig", "evaluate", "diagnose raw embeddings: norms, hubness, Fisher numbers"),
    "embed": Command("EmbedConfig", "embed", "encode a data set into one file, for an index or another program"),
    "report": Command("ReportConfig", "report", "write one HTML page for finished runs"),
    "study": Command("StudyConfig", "study", "run a grid of trainings, with tables, claims and a page"),
    "advise": Command("AdviseConfig", "advise", "find out which side to normalize for a model and its data"),
    "train-text": Command("TextTrainConfig", "train", "fine-tune a text encoder for retrieval"),
    "evaluate-text": Command("TextEvaluateConfig", "evaluate", "evaluate a text encoder, or compare finished runs"),
    "sts": Command("StsConfig", "sts", "check symmetry on scored pairs of sentences"),
    "rag": Command("RagConfig", "rag", "answer questions from the documents that each scoring retrieves"),
    "clip-benchmark": Command(None, "clip_benchmark", "clip-benchmark's own command line, with mmclip's models"),
    "demo": Command("DemoConfig", "demo", "train a baseline, qnorm and its control on built-in scenes, side by side"),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code."""
    run_guarded(lambda: dispatch(list(sys.argv[1:] if argv is None else argv)))


def dispatch(argv: list[str]) -> int:
    """Run the command that ``argv`` names; returns its exit code. Errors: UserError for a wrong command or flag."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: mmclip COMMAND [flags]     (mmclip COMMAND --help lists the flags)\n")
        print("\n".join(f"  {name:15} {command.summary}" for name, command in COMMANDS.items()))
        return 0 if argv else 2
    name, *flags = argv
    if name not in COMMANDS:
        valid = nearest(name[:60], list(COMMANDS)) or f"; one of {', '.join(COMMANDS)} is expected"
        raise UserError(f"unknown command {printable(name, 60)!r}{valid}")
    command, config = COMMANDS[name], None
    if command.config is not None:
        configs = importlib.import_module("mmclip.config")
        config = configs.parse(getattr(configs, command.config), flags, prog=f"mmclip {name}")
    module = importlib.import_module(f"mmclip.commands.{command.module}")
    result = module.main(flags) if config is None else module.run(config)
    return result if isinstance(result, int) else 0


def run_guarded(main: Callable[[], int | None]) -> NoReturn:
    """Leave with main's exit code; a user's error, a full disk or memory is one line and code 2, Ctrl-C code 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is shown escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(main())
    except UserError as error:
        message = str(error)
    except OSError as error:  # a folder that cannot be written, a full disk
        message = f"{printable(error.filename)}: " * bool(error.filename) + str(error.strerror or error)
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors that say so
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        message = f"out of memory: {printable(error)}; a smaller model, --batch-size or --force-image-size needs less"
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    print(f"error: {printable(message, 4000)}", file=sys.stderr)
    sys.exit(2)
