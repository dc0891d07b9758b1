"""A settings dataclass becomes a command line: one definition of name, type, default, help and check for each setting.

argparse and PyYAML do the work; what is added here is one-line errors, the nearest valid name for a misspelt one, and
the order flag > --config file > default. Importing this module must stay cheap: ``--help`` may not wait for torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from mmclip.errors import UsageError, one_line

S = TypeVar("S")
TAB = "\t"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


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
    metadata = {"group": group, "help": help, "type": kind, "choices": choices, "metavar": metavar, "nargs": nargs}
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, valid: Sequence[str]) -> str:
    """'; did you mean X?' for the valid name closest to ``name``, else ''.

    >>> nearest("lrr", ["lr", "wd"])
    '; did you mean lr?'
    """
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(one_line(message, 600))


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


def _flag_name(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


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
        kwargs: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": meta["help"].replace("%", "%%"),
            "dest": field.name,
        }
        if isinstance(field.default, bool):
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs |= {"type": meta["type"], "metavar": meta["metavar"] or word}
            if meta["choices"]:
                kwargs |= {
                    "choices": meta["choices"],
                    "metavar": meta["metavar"] or "{" + ",".join(meta["choices"]) + "}",
                }
            if meta["nargs"]:
                kwargs["nargs"] = meta["nargs"]
        action = group.add_argument(_flag_name(field), **kwargs)
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
    Errors: UsageError, before anything else is imported or loaded.
    """
    parser = build_parser(settings, description, examples, has_config=config_folder is not None)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        valid = [o for a in parser._actions for o in a.option_strings]
        word = next((u for u in unknown if u.startswith("-")), unknown[0])
        raise UsageError(
            f"unknown argument {one_line(word)!r}{nearest(word.split('=')[0], valid)} (--help lists them all)"
        )
    flags = vars(given)
    values: dict[str, Any] = {}
    config = flags.pop("config", None)
    if config is not None and config_folder is not None:
        values = read_config(settings, _find_config(config, config_folder))
    elif default_config is not None and (path := default_config(flags)) is not None:
        values = read_config(settings, path)
    return settings(**(values | flags))


def _find_config(name: str, folder: Path) -> Path:
    """A path, or the bare name of a file in ``folder``: scenes, scenes.yaml."""
    for candidate in (Path(name), folder / name, folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    shipped = sorted(p.stem for p in folder.glob("*.yaml"))
    raise UsageError(f"--config {one_line(name)}: no such file; a path, or one of: {', '.join(shipped)}")


def read_config(settings: type[Any], path: Path) -> dict[str, Any]:
    """The settings in a YAML file, keys with - or _; ${NAME} and ${NAME:-default} come from the environment.

    Only plain YAML is read (safe_load): a file that asks for objects is an error. Errors: UsageError naming the file.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not readable as YAML: {one_line(error)}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: expected 'name: value' lines, got {type(loaded).__name__}")
    fields = {f.name: f for f in dataclasses.fields(settings)}
    values = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise UsageError(f"{path}: unknown setting {one_line(key)!r}{nearest(name, list(fields))}")
        values[name] = _convert(fields[name], value, path)
    return values


def _convert(field: dataclasses.Field[Any], value: Any, path: Path) -> Any:
    where = f"{path}: {field.name}"
    if isinstance(field.default, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{where} is true or false, got {one_line(value)!r}")
        return value
    if value is None:
        if field.default is not None:
            raise UsageError(f"{where} needs a value, got null")
        return None
    if field.metadata["nargs"]:
        if not isinstance(value, list):
            raise UsageError(f"{where} is a list, got {one_line(value)!r}")
        return [_convert_scalar(field, v, where) for v in value]
    return _convert_scalar(field, value, where)


def _convert_scalar(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    if isinstance(value, dict | list):
        raise UsageError(f"{where} is a single value, got {one_line(value)!r}")

    def from_environment(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise UsageError(f"{where} needs the environment variable {match[1]}, or the flag {_flag_name(field)}")
        return found

    text = _VARIABLE.sub(from_environment, str(value))
    try:
        converted = field.metadata["type"](text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{where}: {one_line(text)!r} is not valid: {one_line(error)}") from None
    choices = field.metadata["choices"]
    if choices and converted not in choices:
        raise UsageError(f"{where}: {one_line(text)!r} is not one of {', '.join(choices)}")
    return converted


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a script's main: a UsageError or a full disk is one line and exit code 2, Ctrl-C exit code 130."""
    try:
        main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a folder that cannot be written, a full disk
        where = f"{one_line(error.filename)}: " if error.filename else ""
        print(f"error: {where}{one_line(error.strerror or error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)
