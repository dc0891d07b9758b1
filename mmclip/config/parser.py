"""A config class is a command line and a settings file, both made from its fields.

tyro splits the command line and prints the help; the texts of flags and of YAML files become values in one function,
`convert`. Nothing here imports torch, so that a wrong flag is one line before anything heavy is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, dataclass_transform

import yaml

from mmclip.config.model_config import CONFIGS
from mmclip.errors import UserError, nearest, printable, reason

MAX_BYTES = 100_000  # PyYAML takes two seconds for so many; a settings file has one or two kilobytes
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", bool: ""}
_CONFIG_HELP = "Settings file: YAML with any of these flags by name, or the name of one in configs/; flags override it."


class Check(NamedTuple):
    """The valid values of a field: in words, as a predicate and, where they are few, one by one."""

    valid: str
    ok: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def one_of(*choices: str) -> Check:
    return Check(f"one of {', '.join(choices)}", choices.__contains__, choices)


Count = Annotated[int, Check("a whole number of at least 1", lambda v: v >= 1)]
Whole = Annotated[int, Check("a whole number of at least 0", lambda v: v >= 0)]
Bytes = Annotated[int, Check(f"a whole number of at least {2**20}", lambda v: v >= 2**20)]
Positive = Annotated[float, Check("a number above 0", lambda v: v > 0)]
NotNegative = Annotated[float, Check("a number of at least 0", lambda v: v >= 0)]
Share = Annotated[float, Check("a number from 0 to 1", lambda v: 0 <= v <= 1)]
Inner = Annotated[float, Check("a number between 0 and 1, both excluded", lambda v: 0 < v < 1)]
Fraction = Annotated[float, Check("a number above 0 and at most 1", lambda v: 0 < v <= 1)]
STEPS = "a fraction of the run below 1, or a whole number of steps"
Steps = Annotated[float, Check(STEPS, lambda v: 0 <= v < 1 or (v > 0 and v % 1 == 0))]
FolderName = Annotated[str, Check("a plain folder name, without slashes", re.compile(r"(?!\.{0,2}$)[^/\\]+").fullmatch)]
ExistingPath = Annotated[str, Check("an existing file or folder", lambda v: Path(v).exists())]
ExistingFile = Annotated[str, Check("an existing file", lambda v: Path(v).is_file())]
ExistingFolder = Annotated[str, Check("an existing folder", lambda v: Path(v).is_dir())]
_ANY = Check("a number", lambda v: True)


class Flag(NamedTuple):
    """A field of a config. section: the class that defines it, a group of the help."""

    name: str
    kind: Any
    check: Check
    many: bool
    optional: bool
    default: Any
    section: type

    @property
    def options(self) -> tuple[str, ...]:
        words = self.name.replace("_", "-")
        return (f"--{words}", f"--no-{words}") if self.kind is bool else (f"--{words}",)


def _flags(cls: type) -> dict[str, Flag]:
    """The fields of a config class by name, in their order."""
    hints, flags = typing.get_type_hints(cls, include_extras=True), {}
    for field in dataclasses.fields(cls):
        section = next(c for c in reversed(cls.__mro__) if field.name in vars(c).get("__annotations__", {}))
        missing = field.default is dataclasses.MISSING
        default = field.default_factory() if missing else field.default  # type: ignore[operator]
        hint = hints[field.name]
        if optional := typing.get_origin(hint) in (Union, types.UnionType):
            hint = next(h for h in typing.get_args(hint) if h is not types.NoneType)
        if many := typing.get_origin(hint) is list:
            (hint,) = typing.get_args(hint)
        kind, check = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, _ANY)
        flags[field.name] = Flag(field.name, kind, check, many, optional, default, section)
    return flags


@dataclass_transform(field_specifiers=(dataclasses.field,))
class Config:
    """Base of configs and of their sections, which are dataclasses. Errors: UserError.

    A section states its rules: ``required`` and ``needs`` name a field and why it, or another one of certain values,
    must be set beside it; ``excludes`` are two fields and why they exclude each other; check() is for all else.
    """

    flags: ClassVar[dict[str, Flag]] = {}
    has_config_file: ClassVar[bool] = False  # whether --config names a YAML file with these fields
    most_used: ClassVar[str] = ""  # fields that --help shows first
    required: ClassVar[dict[str, str]] = {}
    needs: ClassVar[dict[str, str]] = {}
    excludes: ClassVar[dict[tuple[str, str], str]] = {}

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(cls)
        cls.flags = _flags(cls)

    def __post_init__(self) -> None:
        for flag in self.flags.values():
            value = getattr(self, flag.name)
            for item in value or () if flag.many else () if value is None else (value,):
                finite = not isinstance(item, float) or math.isfinite(item)
                if not finite or not flag.check.ok(item):
                    valid = f"{flag.check.valid}{'' if finite else ', and a finite one'}"
                    raise UserError(f"{flag.options[0]} {printable(item, 100)}: expected {valid}")
        for base in reversed(type(self).__mro__):
            rules = vars(base)
            for name, what in rules.get("required", {}).items():
                if getattr(self, name) in (None, []):
                    raise UserError(f"{self.flags[name].options[0]} is missing: {what}")
            for name, other in rules.get("needs", {}).items():
                field, *values = other.split()
                if self.is_set(name) and not (getattr(self, field) in values if values else self.is_set(field)):
                    needed = " ".join([self.flags[field].options[0], " or ".join(values)]).strip()
                    raise UserError(f"{self.as_flag(name)} needs {needed}")
            for (first, second), why in rules.get("excludes", {}).items():
                if self.is_set(first) and self.is_set(second):
                    self.exclude(first, second, why)
            if "check" in rules:
                rules["check"](self)

    def exclude(self, first: str, second: str, why: str) -> typing.NoReturn:
        raise UserError(f"{self.as_flag(first)} beside {self.as_flag(second)}: {why}; give one of the two")

    def is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != self.flags[name].default)

    def as_flag(self, name: str) -> str:
        """A field as it would stand on the command line, for messages."""
        flag, value = self.flags[name], getattr(self, name)
        words = value if flag.many else [] if value is True else [f"{value:g}" if isinstance(value, float) else value]
        return printable(" ".join(map(str, [flag.options[0], *words])))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def default_file(cls, flags: Mapping[str, Any]) -> Path | None:
        """The settings file that is read where the flags name none."""
        return None


C = TypeVar("C", bound=Config)


def convert(flag: Flag, value: Any, where: str) -> Any:
    """The value of a field from text, texts or None; others stay. Errors: UserError."""
    if flag.many and isinstance(value, list | tuple):
        return [convert(flag._replace(many=False), item, where) for item in value]
    if value is None and flag.optional:
        return None
    if value is None or flag.many or isinstance(value, list | dict):
        shown = {list: "a list", dict: "a mapping", type(None): "null"}.get(type(value)) or repr(printable(value))
        raise UserError(f"{where} is a {'list' if flag.many else 'single value'}, got {shown}")
    if flag.kind is str or not isinstance(value, str):
        return value
    kinds = {bool: "true or false", float: "a number", int: "a whole number of at most 18 digits"}
    try:
        if flag.kind is bool:
            return _BOOLEANS[value.lower()]
        number = float(value)
        if flag.kind is int and number.is_integer() and abs(number) < 10**18:
            return int(value) if value.strip("+-").isdecimal() else int(number)
        if flag.kind is float:
            return number
    except (KeyError, ValueError):
        pass
    raise UserError(f"{where} {printable(value, 60)!r}: expected {kinds[flag.kind]}")


# --- settings files ---------------------------------------------------------------------------------------------------


class _Texts(yaml.BaseLoader):
    """YAML's structure alone: scalars but null stay text, - in names becomes _, no name twice."""

    def mapping(self, node: yaml.Node) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = str(key.value).replace("-", "_") if isinstance(key, yaml.ScalarNode) else "a list"
            if name in mapping:
                raise yaml.MarkedYAMLError(problem=f"{name} is set twice", problem_mark=key.start_mark)
            mapping[name] = self.construct_object(value, deep=True)
        return mapping


_Texts.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Texts.add_constructor("tag:yaml.org,2002:null", lambda loader, node: None)
_Texts.add_constructor("tag:yaml.org,2002:map", _Texts.mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file, of texts, None, lists and mappings alone. Errors: UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path}: more than {MAX_BYTES:,} bytes, so not a settings file")
        root = yaml.load(content.decode("utf-8-sig"), Loader=_Texts)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        why = reason(error)
        if isinstance(error, yaml.MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            why = printable(error.problem or error.context)
            why += f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        elif isinstance(error, RecursionError):
            why = "nested too deep; 'name: value' lines are expected"
        raise UserError(f"{path}: not readable as YAML: {why}") from None
    if not isinstance(root, dict):
        kind = "nothing" if root is None else "a list" if isinstance(root, list) else "a single value"
        raise UserError(f"{path}: expected 'name: value' lines, got {kind}")
    return root


def values_of(cls: type[Config], mapping: Mapping[str, Any], where: str | Path = "settings") -> dict[str, Any]:
    """Typed values of a mapping, with ${NAME} and ${NAME:-default} filled in. Errors: UserError."""
    flags, values = cls.flags, {}
    for name, value in mapping.items():
        if name not in flags:
            raise UserError(f"{where}: unknown setting {printable(name, 100)!r}{nearest(name[:100], list(flags))}")
        expand = functools.partial(_expanded, flag=flags[name], where=f"{where}: {name}")
        value = [expand(item) for item in value] if isinstance(value, list) else expand(value)
        values[name] = convert(flags[name], value, f"{where}: {name}")
    return values


def _expanded(value: Any, flag: Flag, where: str) -> Any:
    def variable(match: re.Match[str]) -> str:
        text = os.environ.get(match[1], match[2])
        if text is None:
            raise UserError(f"{where} needs the environment variable {match[1]}, or the flag {flag.options[0]}")
        return text

    if not isinstance(value, str):
        return value
    value = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", variable, value)
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):  # no file system and no stream takes them
        raise UserError(f"{where}: {printable(value, 80)!r} holds a NUL or half a character")
    return value


def from_settings(cls: type[C], mapping: Mapping[str, Any], where: str | Path = "settings") -> C:
    """A checked config from a mapping of texts or values, else defaults. Errors: UserError."""
    return cls(**values_of(cls, mapping, where))


def load_config(cls: type[C], path: str | Path) -> C:
    """A checked config from a YAML file. Errors: UserError naming the file."""
    return from_settings(cls, read_yaml(Path(path)), path)


def find_config(name: str, study: bool = False, source: str = "--config") -> Path:
    """A settings file by its path, or its bare name in configs/. Errors: UserError."""
    for candidate in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    shipped = sorted(p.stem for p in CONFIGS.glob("*.yaml") if p.stem.startswith("study_") is study)
    raise UserError(f"{source} {printable(name)}: no such file; a path, or one of: {', '.join(shipped)}")


# --- command line -----------------------------------------------------------------------------------------------------


def parse(cls: type[C], argv: Sequence[str] | None = None, prog: str | None = None) -> C:
    """Flags over settings file over defaults, checked; --help leaves with 0. Errors: UserError."""
    flags = _split(cls, list(sys.argv[1:] if argv is None else argv), prog)
    file = flags.pop("config", None) if cls.has_config_file else None
    path = find_config(file) if file is not None else cls.default_file(flags)
    return cls(**(values_of(cls, read_yaml(path), path) if path is not None else {}) | flags)


def _split(cls: type[Config], argv: list[str], prog: str | None) -> dict[str, Any]:
    """The values of the flags on the command line; --help prints it and leaves."""
    import tyro

    flags = dict(cls.flags)
    if cls.has_config_file:
        flags["config"] = Flag("config", str, _ANY, False, True, None, cls)
    docs = _field_docs(cls) if {"-h", "--help"} & set(argv) else {}
    about = _description(cls, docs) if docs else ""
    how: Any = {"config": (tyro.conf.OmitArgPrefixes,), "return_unknown_args": True}
    parsed, unknown = tyro.cli(_shape(cls, flags, docs), args=argv, prog=prog, description=about, **how)
    if unknown:
        word = printable(next((u for u in unknown if u.startswith("-")), unknown[0]).partition("=")[0])
        close = nearest(word, [option for flag in flags.values() for option in flag.options])
        raise UserError(f"unknown argument {word!r}{close} (--help lists them all)")
    words = {word.partition("=")[0].replace("_", "-") for word in argv}
    values: dict[str, Any] = {}
    for name, value in (item for group in vars(parsed).values() for item in vars(group).items()):
        flag, option = flags[name], flags[name].options[0]
        if flag.kind is bool:
            values |= {name: value} if words & set(flag.options) else {}
        elif value is not None:
            if not flag.many and len(value) != 1:
                raise UserError(f"{option} takes one value, got {printable(' '.join(value)) or 'none'}")
            values[name] = convert(flag, value if flag.many else value[0], option)
    return values


def _shape(cls: type[Config], flags: Mapping[str, Flag], docs: Mapping[str, str]) -> Any:
    """A dataclass of the sections for tyro, whose values stay lists of texts."""
    import tyro
    from tyro.constructors import PrimitiveConstructorSpec

    groups: dict[type, list[Any]] = {}
    for name, flag in flags.items():
        word = "{" + ",".join(flag.check.choices) + "}" if flag.check.choices else _METAVARS[flag.kind]
        texts = PrimitiveConstructorSpec("*", f"[{word} ...]" if flag.many else word, list, bool, lambda value: [])
        shown = " ".join(map(str, flag.default or ())) if flag.many else str(flag.default).replace("\t", "tab")
        hint = {"": "", "None": "", "False": "", "True": "[on]"}.get(shown, f"[{shown}]")
        about = tyro.conf.arg(help=docs.get(name, ""), help_behavior_hint=hint)
        kind: Any = bool if flag.kind is bool else Annotated[Any, texts]
        default = bool(flag.default) if flag.kind is bool else None
        groups.setdefault(flag.section, []).append((name, Annotated[kind, about], default))
    sections = []
    for section, fields in groups.items():
        title = {"__doc__": "" if section is cls else str(section.__doc__).partition("\n")[0]}
        group = dataclasses.make_dataclass(section.__name__, fields, namespace=title)
        name = re.sub("(?<!^)(?=[A-Z])", "_", section.__name__.removesuffix("Config")).lower()
        sections.append((name, group, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass(cls.__name__, sections)


def _field_docs(cls: type[Config]) -> dict[str, str]:
    """The comment beside each field in the source of its class, or the docstring below it."""
    docs = {"config": _CONFIG_HELP}
    field = re.compile(r'^    (\w+): [^\n]*?(?:  # ([^\n]*)|\n    """(.*?)""")$', re.M | re.S)
    for base in reversed([c for c in cls.__mro__ if issubclass(c, Config)]):
        docs |= {m[1]: " ".join((m[2] or m[3]).split()) for m in field.finditer(inspect.getsource(base))}
    return docs


def _description(cls: type[Config], docs: Mapping[str, str]) -> str:
    """The class's docstring, with the flags that are used most after its examples."""
    sentence, examples, *more = inspect.cleandoc(str(cls.__doc__)).split("\n\n")
    lines = [f"  --{name.replace('_', '-'):17}{docs[name].partition('. ')[0]}" for name in cls.most_used.split()]
    return "\n\n".join([sentence, examples, *(["\n".join(["Most used:", *lines])] if lines else []), *more])
