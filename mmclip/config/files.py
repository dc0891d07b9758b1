"""Settings files: YAML whose structure is read and from which nothing is built."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from mmclip.errors import UserError, printable, reason

MAX_CONFIG_BYTES = 100_000  # PyYAML takes two seconds for so many; ours have one or two kilobytes
STUDY = "study_"  # what the names of study files begin with
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_YAML = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_YAML + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "value")}
_TAGS = {yaml.ScalarNode: _PLAIN_TAGS, yaml.SequenceNode: {_YAML + "seq"}, yaml.MappingNode: {_YAML + "map"}}


def nearest(name: str, valid: Sequence[str]) -> str:
    """'; did you mean X?' for the valid name closest to ``name``, else ''.

    >>> nearest("lrr", ["lr", "wd"])
    '; did you mean lr?'
    """
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def flag_name(field: dataclasses.Field[Any]) -> str:
    """--train-data of the field train_data."""
    return "--" + field.name.replace("_", "-")


def find_config(name: str, folder: Path, study: bool = False, asked: str = "--config") -> Path:
    """A path, or the bare name of a file in ``folder``: scenes, scenes.yaml. study: a grid of runs is asked
    for, not one run. asked: what named it. Errors: UserError naming what is there."""
    for candidate in (Path(name), folder / name, folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    shipped = sorted(p.stem for p in folder.glob("*.yaml") if p.stem.startswith(STUDY) is study)
    raise UserError(f"{asked} {printable(name)}: no such file; a path, or one of: {', '.join(shipped)}")


def read_config(settings: type[Any], path: Path) -> dict[str, Any]:
    """The settings in a YAML file, keys with - or _; ${NAME} and ${NAME:-default} come from the environment.

    YAML's structure is read and nothing is built from it: a value is the text that stands there, converted as a flag's
    is, so no tag can ask for an object and no alias can grow. Errors: UserError naming the file.
    """
    return converted(settings, name_value_nodes(path), path)


def converted(settings: type[Any], pairs: Iterable[tuple[yaml.Node, yaml.Node]], path: Path) -> dict[str, Any]:
    """The values of (name, value) nodes, which ``path`` holds, as ``settings`` takes them. Errors: UserError."""
    fields = {f.name: f for f in dataclasses.fields(settings)}
    values: dict[str, Any] = {}
    for key, value in pairs:
        name = name_of(key)
        if name not in fields:
            raise UserError(f"{path}: unknown setting {printable(name, 100)!r}{nearest(name[:100], list(fields))}")
        if name in values:
            raise UserError(f"{path}: {name} is set twice, the second time in line {key.start_mark.line + 1}")
        values[name] = convert(fields[name], value, path)
    return values


def name_of(key: yaml.Node) -> str:
    return key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else kind_of(key)


def name_value_nodes(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """(name, value) nodes of a file that holds 'name: value' lines. Errors: UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise UserError(f"{path}: more than {MAX_CONFIG_BYTES:,} bytes, so not a settings file")
        root = yaml.compose(content.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}: not readable as YAML: {printable(error.problem or error.context)}{where}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first_line = reason(error).partition("\\n")[0]
        raise UserError(f"{path}: not readable as YAML: {first_line}") from None
    except RecursionError:
        raise UserError(f"{path}: not readable as YAML: nested too deep; 'name: value' lines are expected") from None
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}: expected 'name: value' lines, got {kind_of(root)}")
    pairs: list[tuple[yaml.Node, yaml.Node]] = root.value
    return pairs


def kind_of(node: yaml.Node | None) -> str:
    names = {yaml.ScalarNode: "a single value", yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}
    return names[type(node)] if node is not None else "nothing"


def convert(field: dataclasses.Field[Any], node: yaml.Node, path: Path) -> Any:
    """A node as the value of a setting. Errors: UserError naming both."""
    where = f"{path}: {field.name}"
    if field.metadata["nargs"] and isinstance(node, yaml.SequenceNode):
        require_plain(node, where)
        return [_convert_text(field, text_of(item, where), where) for item in node.value]
    if is_null(node):
        if field.default is not None:
            raise UserError(f"{where} needs a value, got null")
        return None
    text = text_of(node, where)
    if field.metadata["nargs"]:
        raise UserError(f"{where} is a list, got {printable(text)!r}")
    if isinstance(field.default, bool):
        value = yaml.SafeLoader.bool_values.get(text.lower())
        if value is None:
            raise UserError(f"{where} is true or false, got {printable(text)!r}")
        return value
    return _convert_text(field, text, where)


def text_of(node: yaml.Node, where: str) -> str:
    """A single value as it stands in the file. Errors: UserError for anything else."""
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"{where} is a single value, got {kind_of(node)}")
    require_plain(node, where)
    text: str = node.value
    _require_encodable(text, where)
    return text


def is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and bool(node.tag == _YAML + "null")


def require_plain(node: yaml.Node, where: str) -> None:
    """Errors: UserError for a value, list or mapping with a tag that asks for an object."""
    if node.tag not in _TAGS[type(node)]:
        raise UserError(f"{where}: {printable(node.tag.replace(_YAML, '!!'), 80)} is not read, plain values only")


def _require_encodable(text: str, where: str) -> None:
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):  # no file system and no stream takes them
        raise UserError(f"{where}: {printable(text, 80)!r} holds a NUL or half a character")


def _convert_text(field: dataclasses.Field[Any], text: str, where: str) -> Any:
    def from_environment(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise UserError(f"{where} needs the environment variable {match[1]}, or the flag {flag_name(field)}")
        return found

    text = _VARIABLE.sub(from_environment, text)
    _require_encodable(text, where)
    try:
        value = field.metadata["type"](text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UserError(f"{where}: {printable(text)!r} is not valid: {printable(error)}") from None
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UserError(f"{where}: {printable(text)!r} is not one of {', '.join(choices)}")
    return value
