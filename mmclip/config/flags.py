"""A settings dataclass becomes a command line: one definition of name, type, default, help and check for each setting.

argparse and PyYAML do the work; what is added here is one-line errors, the nearest valid name for a misspelt one, and
the order flag > --config file > default. Importing this module must stay cheap: ``--help`` may not wait for torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mmclip.config.files import find_config, flag_name, nearest, read_config
from mmclip.errors import UserError, printable

S = TypeVar("S")
TAB = "\t"


def flag(
    default: Any,
    group: str,
    help: str,
    type: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    nargs: str | None = None,
) -> Any:
    """A dataclass field that is also a flag. ``type`` converts its text; a bool default makes --x/--no-x."""
    kind = type or (str if default is None else default.__class__)
    kind = whole_number if kind is int else kind
    metadata = {"group": group, "help": help, "type": kind, "choices": choices, "metavar": metavar, "nargs": nargs}
    return dataclasses.field(default=default, metadata=metadata)


def whole_number(text: str) -> int:
    """'3' and '3.0' -> 3. Errors: ArgumentTypeError for anything that is no whole number of at most 18 digits.

    >>> whole_number("1e3")
    1000
    """
    try:
        value = int(text)
    except ValueError:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not number.is_integer():
            raise argparse.ArgumentTypeError(f"{printable(text, 60)!r} is not a whole number") from None
        value = int(number)
    if abs(value) >= 10**18:  # what comes after could not count so far
        raise argparse.ArgumentTypeError(f"{printable(text, 60)!r} has more than 18 digits")
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(printable(message, 600))


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows defaults beside the help and leaves the examples' line breaks alone."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.help or ""
        default = action.metavar_default if hasattr(action, "metavar_default") else None
        return (
            shown
            if default is False or default in (None, "", [])
            else f"{shown} [{default if default != TAB else 'tab'}]"
        )


def build_parser(settings: type[Any], description: str, examples: str, has_config: bool) -> argparse.ArgumentParser:
    """The parser of a settings class: every flag defaults to "not given", so that a config file can fill it."""
    parser = _Parser(
        usage="%(prog)s [--FLAG VALUE ...]",
        description=description,
        epilog=examples,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_help=True,
    )
    groups: dict[str, Any] = {}
    if has_config:
        groups["run"] = parser.add_argument_group("run")
        groups["run"].add_argument(
            "--config", metavar="YAML", help="settings file: any flag by name; flags override it"
        )
    for field in dataclasses.fields(settings):
        meta = field.metadata
        group = groups.get(meta["group"]) or groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        word = field.name.rsplit("_", 1)[-1].upper()
        text = meta["help"].replace("%", "%%")
        kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text, "dest": field.name}
        if isinstance(field.default, bool):
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs |= {"type": meta["type"], "metavar": meta["metavar"] or word}
            if meta["choices"]:
                names = "{" + ",".join(meta["choices"]) + "}"
                kwargs |= {"choices": meta["choices"], "metavar": meta["metavar"] or names}
            if meta["nargs"]:
                kwargs["nargs"] = meta["nargs"]
        action = group.add_argument(flag_name(field), **kwargs)
        action.metavar_default = field.default
    return parser


def parse(
    settings: type[S],
    argv: Sequence[str] | None,
    description: str,
    examples: str,
    config_folder: Path | None = None,
    default_config: Callable[[dict[str, Any]], Path | None] | None = None,
) -> S:
    """Flags over config file over defaults, as a validated settings object.

    ``default_config`` may name a file to use where no --config was given, from the flags that were.
    Errors: UserError, before anything else is imported or loaded.
    """
    parser = build_parser(settings, description, examples, has_config=config_folder is not None)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        valid = [o for a in parser._actions for o in a.option_strings]
        word = next((u for u in unknown if u.startswith("-")), unknown[0])
        raise UserError(
            f"unknown argument {printable(word)!r}{nearest(word.split('=')[0], valid)} (--help lists them all)"
        )
    flags = vars(given)
    values: dict[str, Any] = {}
    config = flags.pop("config", None) if config_folder is not None else None
    if config is not None and config_folder is not None:
        values = read_config(settings, find_config(config, config_folder))
    elif default_config is not None and (path := default_config(flags)) is not None:
        values = read_config(settings, path)
    return settings(**(values | flags))


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a script's main: a UserError, a full disk or memory is one line and exit code 2, Ctrl-C exit code 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is shown escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except UserError as error:
        _fail(str(error))
    except OSError as error:  # a folder that cannot be written, a full disk
        where = f"{printable(error.filename)}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors that say so
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        _fail(f"out of memory: {printable(error)}; a smaller model, --batch-size or --force-image-size needs less")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _fail(message: str) -> NoReturn:
    """One line whatever a message took from data or a path."""
    print(f"error: {printable(message, 4000)}", file=sys.stderr)
    sys.exit(2)
