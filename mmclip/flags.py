"""A settings dataclass becomes a command line: one definition of name, type, default, help and check for each setting.

argparse and PyYAML do the work; what is added here is one-line errors, the nearest valid name for a misspelt one, and
the order flag > --config file > default. Importing this module must stay cheap: ``--help`` may not wait for torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import math
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
MAX_CONFIG_BYTES = 100_000  # PyYAML takes two seconds for so many; ours have one or two kilobytes
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_YAML = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_YAML + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "value")}


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
            raise argparse.ArgumentTypeError(f"{one_line(text, 60)!r} is not a whole number") from None
        value = int(number)
    if abs(value) >= 10**18:  # what comes after could not count so far
        raise argparse.ArgumentTypeError(f"{one_line(text, 60)!r} has more than 18 digits")
    return value


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

    YAML's structure is read and nothing is built from it: a value is the text that stands there, converted as a flag's
    is, so no tag can ask for an object and no alias can grow. Errors: UsageError naming the file.
    """
    fields = {f.name: f for f in dataclasses.fields(settings)}
    values: dict[str, Any] = {}
    for key, value in _name_value_nodes(path):
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else _kind(key)
        if name not in fields:
            raise UsageError(f"{path}: unknown setting {one_line(name, 100)!r}{nearest(name[:100], list(fields))}")
        if name in values:
            raise UsageError(f"{path}: {name} is set twice, the second time in line {key.start_mark.line + 1}")
        values[name] = _convert(fields[name], value, path)
    return values


def _name_value_nodes(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise UsageError(f"{path}: more than {MAX_CONFIG_BYTES:,} bytes, so not a settings file")
        root = yaml.compose(content.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{path}: not readable as YAML: {one_line(error.problem or error.context)}{where}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not readable as YAML: {str(error).partition(chr(10))[0]}") from None
    except RecursionError:
        raise UsageError(f"{path}: not readable as YAML: nested too deep; 'name: value' lines are expected") from None
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: expected 'name: value' lines, got {_kind(root)}")
    pairs: list[tuple[yaml.Node, yaml.Node]] = root.value
    return pairs


def _kind(node: yaml.Node | None) -> str:
    names = {yaml.ScalarNode: "a single value", yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}
    return names[type(node)] if node is not None else "nothing"


def _convert(field: dataclasses.Field[Any], node: yaml.Node, path: Path) -> Any:
    where = f"{path}: {field.name}"
    if field.metadata["nargs"] and isinstance(node, yaml.SequenceNode):
        return [_convert_text(field, _text(item, where), where) for item in node.value]
    if isinstance(node, yaml.ScalarNode) and node.tag == _YAML + "null":
        if field.default is not None:
            raise UsageError(f"{where} needs a value, got null")
        return None
    text = _text(node, where)
    if field.metadata["nargs"]:
        raise UsageError(f"{where} is a list, got {one_line(text)!r}")
    if isinstance(field.default, bool):
        value = yaml.SafeLoader.bool_values.get(text.lower())
        if value is None:
            raise UsageError(f"{where} is true or false, got {one_line(text)!r}")
        return value
    return _convert_text(field, text, where)


def _text(node: yaml.Node, where: str) -> str:
    """A single value as it stands in the file. Errors: UsageError for anything else."""
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError(f"{where} is a single value, got {_kind(node)}")
    if node.tag not in _PLAIN_TAGS:
        raise UsageError(f"{where}: {one_line(node.tag.replace(_YAML, '!!'), 80)} is not read, plain values only")
    text: str = node.value
    return text


def _convert_text(field: dataclasses.Field[Any], text: str, where: str) -> Any:
    def from_environment(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise UsageError(f"{where} needs the environment variable {match[1]}, or the flag {_flag_name(field)}")
        return found

    text = _VARIABLE.sub(from_environment, text)
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):  # no file system and no stream takes them
        raise UsageError(f"{where}: {one_line(text, 80)!r} holds a NUL or half a character")
    try:
        converted = field.metadata["type"](text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{where}: {one_line(text)!r} is not valid: {one_line(error)}") from None
    choices = field.metadata["choices"]
    if choices and converted not in choices:
        raise UsageError(f"{where}: {one_line(text)!r} is not one of {', '.join(choices)}")
    return converted


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a script's main: a UsageError, a full disk or memory is one line and exit code 2, Ctrl-C exit code 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is shown escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except UsageError as error:
        _fail(str(error))
    except OSError as error:  # a folder that cannot be written, a full disk
        where = f"{one_line(error.filename)}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors that say so
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        _fail(f"out of memory: {one_line(error)}; a smaller model, --batch-size or --force-image-size needs less")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _fail(message: str) -> NoReturn:
    """One line whatever a message took from data or a path."""
    print(f"error: {one_line(message, 4000)}", file=sys.stderr)
    sys.exit(2)
