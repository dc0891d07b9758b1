"""Damage: to bytes of any file, and to what a file of a form is made of. Every draw comes from the given generator."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from fuzz_values import NUMBERS, SETTINGS, TAR_FIELDS, TEXTS, YAML_VALUES, YAML_WORDS
from safetensors.torch import load_file, save_file
from torch import Tensor

Random = random.Random


def damage(path: Path, others: list[Path], rng: Random) -> None:
    """Change a file in place: its bytes, or what a file of its form is made of."""
    by_form: dict[str, Callable[[Path, Random], None]] = {
        ".tar": _tar,
        ".csv": _csv,
        ".yaml": _yaml,
        ".json": _json,
        ".jsonl": _json_lines,
        ".pt": _torch,
        ".safetensors": _safetensors,
    }
    form = by_form.get(path.suffix)
    if form is not None and rng.random() < 0.7:
        form(path, rng)
        return
    content = path.read_bytes()
    for _ in range(rng.choice((1, 1, 2, 4)) if len(content) > 4096 else 1):  # of a small file something must be left
        content = _bytes(content, rng.choice(others).read_bytes(), rng)
    path.write_bytes(content)


# --- bytes of any file ----------------------------------------------------------------------------------------------


def _place(size: int, rng: Random) -> int:
    """Where to damage: files keep their structure at both ends, and large ones are numbers in between."""
    near = min(size, 4096)
    return rng.choice((rng.randrange(size), rng.randrange(near), size - 1 - rng.randrange(near)))


def _bytes(content: bytes, other: bytes, rng: Random) -> bytes:
    if not content:
        return rng.randbytes(rng.randrange(64))
    at, length = _place(len(content), rng), min(rng.choice((1, 4, 16, 128, 512, 2048)), len(content) // 16 + 1)
    block, how = content[at : at + length], rng.randrange(9)
    if how == 0:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 2, 8))):
            changed[_place(len(content), rng)] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if how == 1:
        return content[:at]
    if how == 2:
        return (
            content[:at] + rng.choice((b"\0", b"\xff", b"\n", rng.randbytes(1))) * len(block) + content[at + length :]
        )
    if how == 3:
        return content[:at] + rng.randbytes(len(block)) + content[at + length :]
    if how == 4:
        return content[:at] + block * rng.choice((2, 3, 50)) + content[at + length :]
    if how == 5:
        return content[:at] + rng.choice((rng.randbytes(length), rng.choice(TEXTS).encode())) + content[at:]
    if how == 6:
        return content[:at] + content[at + length :]
    if how == 7:
        start = _place(len(other), rng)
        return content[:at] + other[start : start + length] + content[at + length :]
    to = _place(len(content), rng)
    a, b = sorted((at, to))
    return content[:a] + content[b : b + length] + content[a:b] + content[b + length :]


# --- what files are made of -----------------------------------------------------------------------------------------


def _tar(path: Path, rng: Random) -> None:
    """A field of a member's header, its checksum right again."""
    content = bytearray(path.read_bytes())
    headers, at = [], 0
    while at + 512 <= len(content) and any(content[at : at + 512]):
        headers.append(at)
        at += 512 + -(-int(content[at + 124 : at + 135], 8) // 512) * 512
    start = rng.choice(headers)
    offset, length = TAR_FIELDS[rng.choice(list(TAR_FIELDS))]
    values = (
        *(
            rng.choice(TEXTS).encode(),
            rng.choice((b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"S", b"x", b"g", b"L", b"K")),
        ),
        *(
            b"%o" % rng.choice((0, 1, 511, 10**6, 8**10)),
            b"\xff" * length,
            b"\x80" + rng.randbytes(length),
            b"7" * length,
        ),
    )
    content[start + offset : start + offset + length] = rng.choice(values)[:length].ljust(length, b"\0")
    content[start + 148 : start + 156] = b" " * 8
    content[start + 148 : start + 156] = b"%06o\0 " % sum(content[start : start + 512])
    path.write_bytes(content)


def _csv(path: Path, rng: Random) -> None:
    rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8")), delimiter="\t"))
    row = rng.choice(rows) if rng.random() < 0.8 else rows[0]
    how = rng.randrange(5)
    if how == 0:
        row[rng.randrange(len(row))] = rng.choice(TEXTS)
    elif how == 1:
        row.append(rng.choice(TEXTS))
    elif how == 2:
        del row[rng.randrange(len(row))]
    elif how == 3:
        rows.insert(rng.randrange(len(rows)), list(rng.choice(rows)))
    else:
        row.reverse()
    out = io.StringIO()
    csv.writer(out, delimiter="\t").writerows(rows)
    text = out.getvalue()
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(('"', '""', "\t", "\n", "\r", "\0")) + text[at:]
    path.write_text(text, encoding=rng.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16")), newline="")


def _yaml(path: Path, rng: Random) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    name = rng.choice((rng.choice(lines).split(":")[0], rng.choice(list(SETTINGS))))
    plain = yaml.safe_dump(rng.choice((rng.choice(TEXTS), rng.choice(NUMBERS)))).removesuffix("...\n").strip()
    value = rng.choice((rng.choice(SETTINGS.get(name, ("1",))), rng.choice(YAML_WORDS), plain, rng.choice(YAML_VALUES)))
    how = rng.randrange(8)
    if how > 0:
        lines = [line for line in lines if line.split(":")[0] != name]
    if how == 1:
        name = rng.choice((name + "x", name.upper(), name.replace("_", "-"), rng.choice(TEXTS), "[a, b]"))
    lines.insert(rng.randrange(len(lines) + 1), f"{name}: {value}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _json(path: Path, rng: Random) -> None:
    value = _changed(json.loads(path.read_text(encoding="utf-8")), rng)
    path.write_text(json.dumps(value), encoding="utf-8")


def _json_lines(path: Path, rng: Random) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(_changed(json.loads(lines[at]), rng))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _torch(path: Path, rng: Random) -> None:
    torch.save(_changed(torch.load(path, weights_only=True), rng), path)


def _safetensors(path: Path, rng: Random) -> None:
    if rng.random() < 0.5:
        state = _changed(load_file(path), rng)
        with contextlib.suppress(Exception):  # not everything can be kept in such a file
            save_file({k: v.contiguous() for k, v in state.items()}, path)
            return
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(_changed(json.loads(content[8 : 8 + length]), rng)).encode()
    told = rng.choice((len(header), len(header), len(header) + 8, 2**63, 10**9))
    path.write_bytes(struct.pack("<Q", told) + header + content[8 + length :])


def _changed(value: Any, rng: Random) -> Any:
    """A copy with one thing in it changed, at any depth."""
    whole: dict[Any, Any] = {"": copy.deepcopy(value)}
    owner, key = whole, ""
    while isinstance(owner[key], dict | list) and owner[key] and (key == "" or rng.random() < 0.8):
        owner = owner[key]
        key = rng.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
    how = rng.randrange(6)
    if how == 0:
        del owner[key]
    elif how == 1 and isinstance(owner, dict):
        owner[rng.choice(("", "x", 7, f"{key}x"))] = owner.pop(key)
    elif how == 2 and isinstance(owner, dict):
        owner["extra"] = rng.choice((owner[key], 1, "x"))
    elif isinstance(owner[key], Tensor) and how < 5:
        owner[key] = _tensor(owner[key], rng)
    else:
        owner[key] = rng.choice(
            (rng.choice(NUMBERS), rng.choice(TEXTS), None, True, [], {}, [owner[key]], {"x": owner[key]})
        )
    return whole.get("")


def _tensor(tensor: Tensor, rng: Random) -> Tensor:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda t: torch.full(t.shape, torch.nan),
        lambda t: torch.full(t.shape, torch.inf),
        lambda t: t.float() * 1e30,
        lambda t: t[:-1] if t.ndim and len(t) else t[None],
        lambda t: t[None],
        lambda t: t.reshape(-1),
        lambda t: t.new_zeros(0),
        lambda t: t.new_zeros(1).expand(1000, 1000),
        lambda t: t.half(),
        lambda t: t.double(),
        lambda t: t.int() if t.isfinite().all() else t,
        lambda t: t.to(torch.complex64),
        lambda t: t.bool(),
        lambda t: t.to("meta"),
        lambda t: t.to_sparse(),
    ]
    return rng.choice(changes)(tensor)
