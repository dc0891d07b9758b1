#!/usr/bin/env python3
"""Regression test of everything the commands write, against frozen numbers. Not collected by pytest:

    python tests/golden.py compare                    # minutes: tiny runs of every kind, a small study
    python tests/golden.py compare --full             # an hour: make demo, the scenes study, MiniLM on real data
    python tests/golden.py compare --only text study  # some sections
    python tests/golden.py freeze [--full]            # rewrite tests/golden/golden_quick.json (_full), on purpose

Runs command lines in processes and reads the files they leave: results.json, start.json, metrics.jsonl, per_query.npz,
weights, CSV tables, TREC files, and the output of comparisons. --root runs the scripts of another checkout. compare
prints missing, new and changed values and exits with 1 if there are any.

Ranks, rates, counts and words are compared exactly, losses to 1e-6, intervals of rates to 1e-9, other intervals to
1e-6, other numbers to 1e-5. Frozen on one thread, since the number of threads decides the order of sums. Another
processor or torch may change last digits, which training amplifies: freeze the old tree there (--root) into another
file and compare with that (--golden).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # for tests.helpers
Json = dict[str, Any]
Facts = dict[str, Json]  # "section/run/file" -> key -> number, text or list of them

SKIPPED = {"path", "versions", "seconds", "samples_per_second", "pairs_per_second", "data_wait", "took", "date"}
RATE = re.compile(r"^(success|recall|mrr|ndcg|r|p)@\d+|^(map|(median|mean|first)_rank|tied_queries|acc1|chance)$")
DIGITS = {"rate": 10, "loss": 9, "other": 7}  # significant digits that are kept
KEYS = {  # the keys of results.json that are kept, by their names in runs.yaml
    "all": "",
    "pools": r"(?!pools/[^/]+/(diagnostics|retrieval/.../(dot|qnorm|dnorm)|.*/(ci|by_|quantiles)))",
    "main": r"(?!pools/|diagnostics/|fingerprint/|.*/(by_|quantiles))",
    "scorings": r"retrieval/.../(native|reversed|corrected)",
    "advice": r"(?!sections/.2./norms/.*/(ci|by_)|trial/)",
    "sts": r"(?!runs/|.*/quantiles)",
}
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
STARTERS = ("run_study.py", "demo.py")  # start processes of their own


class Recorder:
    """Runs the scripts of a checkout, section by section, and records what they write."""

    def __init__(self, root: Path, work: Path, data: Path) -> None:
        self.root, self.work, self.data = root, work, data
        shared = Path(os.environ.get("MMCLIP_SHARED", HERE.parent.parent / "shared")).resolve()
        self.shared = shared if (shared / "data").is_dir() else None
        self.facts: Facts = {}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MMCLIP", "TORCH", "COLUMNS"))}
        self.environment = {**kept, **THREADS, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1",
                            "MMCLIP_DATA": str(data), "HF_HUB_OFFLINE": "1", "COLUMNS": "250"}  # fmt: skip
        code = "import importlib.util as u; print(u.find_spec('mmclip').origin)"
        origin = self.process([sys.executable, "-c", code], work).stdout.strip()
        if not Path(origin).is_relative_to(root):  # an editable install of another checkout
            sys.exit(f"{root}: its scripts would import {origin}")

    def record(self, name: str, section: Json) -> None:
        """Take the steps of a section of runs.yaml."""
        self.section, self.here, self.short = name, self.work / name, section
        self.places: dict[str, object] = {"here": self.here, "shared": self.shared}
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir(parents=True)
        for step in section["steps"]:
            if isinstance(step, str):
                globals()[step](self)
            elif "write" in step:
                (self.here / step["write"]).write_text(step["text"].format(**self.places))
            elif "take" in step:
                (folder,) = self.here.glob(step["take"])
                self.facts |= self.read(step.get("as", folder.name), folder, step.get("keys", "all"))
            else:
                text = self.run(step["run"], step.get("ranks", 1))
                if "output" in step:  # lines without frames
                    lines = (" ".join(re.sub(r"[─━│┃┏┓┗┛┌┐└┘├┤┬┴┼═]", " ", line).split()) for line in text.splitlines())
                    self.facts[f"{name}/{step['output']}"] = {"lines": [self.clean(line) for line in lines if line]}

    def process(self, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True, check=False)

    def run(self, line: str, ranks: int = 1) -> str:
        """The output of "SCRIPT FLAG..."; exits if the script fails."""
        began = time.monotonic()
        words = [word for short in line.split() for word in self.short.get(short, short).split()]
        script, *flags = [word.format(**self.places) for word in words]
        words = [str(self.root / "scripts" / script), *flags]
        if script in STARTERS:
            done = self.process([sys.executable, *words], self.here)
        else:
            from tests.helpers.warm import run_warm

            done = run_warm(words, self.here, self.environment, 3600, ranks)
        if done.returncode:
            sys.exit(f"{done.stderr[-6000:]}\n{line}\nfailed with {done.returncode}")
        print(f"  {time.monotonic() - began:5.0f} s  {line[:150]}", flush=True)
        return done.stdout

    def read(self, name: str, folder: Path, keys: str) -> Facts:
        """The values in the files of a run's, an evaluation's or a study's folder."""
        found: Facts = {}
        apart = {"checkpoints", "settings", "runs" if (folder / "study.json").is_file() else ""}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            inner = path.relative_to(folder)
            reader = READERS.get(path.name) or READERS.get(path.suffix)
            if reader is None or apart & set(inner.parts[:-1]):
                continue
            wanted = keys if path.suffix == ".json" else "all"
            if path.name == "start.json" or (path.suffix == ".json" and "evaluations" in inner.parts):
                wanted = "main"
            where = f"{self.section}/{name}/{inner}"
            if values := {k: v for k, v in reader(path).items() if re.match(KEYS[wanted], k)}:
                found[where] = {k: self.clean(v, digits(where, k)) for k, v in values.items()}
        return found or sys.exit(f"{folder}: no results")

    def clean(self, value: Any, kept: int = 17) -> Any:
        """Remove paths from texts and round floats to ``kept`` significant digits."""
        if isinstance(value, list):
            return [self.clean(v, kept) for v in value]
        if isinstance(value, str):
            for place, name in ((self.work, "WORK"), (self.data, "DATA"), (self.root, "ROOT"), (self.shared, "SHARED")):
                value = value.replace(str(place), name) if place else value
        elif isinstance(value, float):
            value = float(f"{value:.{kept}g}") if abs(value) > 1e-12 else 0.0
            return int(value) if value.is_integer() and abs(value) < 1e15 else value
        return value


# --- readers: a file -> {key: scalar or list of scalars} --------------------------------------------------------------


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        if not value:
            yield key, "{}"
        for name, inner in value.items():
            if name not in SKIPPED:
                yield from flatten(inner, f"{key}/{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{key}/{i}")
    else:
        yield key, value


def read_json(path: Path) -> Json:
    return dict(flatten(json.loads(path.read_text(encoding="utf-8"))))


def read_lines(path: Path) -> Json:
    """metrics.jsonl as a list of each key, null in lines without it."""
    lines = [dict(flatten(json.loads(line))) for line in path.read_text(encoding="utf-8").splitlines()]
    return {key: [line.get(key) for line in lines] for key in dict.fromkeys(k for line in lines for k in line)}


def read_csv(path: Path) -> Json:
    def number(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    with path.open(encoding="utf-8", newline="") as file:
        heads, *rows = list(csv.reader(file)) or [[]]
    columns = {h: [number(row[i]) for row in rows] for i, h in enumerate(heads) if not SKIPPED & set(h.split("_"))}
    return {"(rows)": len(rows), **columns}


def read_arrays(path: Path) -> Json:
    """A digest of the integers and rates of each group (POOL/DIRECTION/SCORING); sums of other floats."""
    found: Json = {}
    digests: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in sorted(arrays.files):
            group, last = (name if "/" in name else f"{name}/{name}").rsplit("/", 1)
            array = arrays[name]
            values = array.astype(np.float64)
            if array.dtype.kind in "iub" or RATE.match(last):
                if array.dtype.kind == "f":  # the last digits of a rate are no rank
                    values = np.round(values, 6) + 0.0
                digest = digests.setdefault(group, hashlib.sha256())
                digest.update(f"{last} {array.shape}".encode() + values.tobytes())
            else:
                found |= {f"{name}/sum_of_abs": float(np.abs(values).sum()), f"{name}/n": array.size}
    return found | {f"{group}/digest": digest.hexdigest()[:12] for group, digest in digests.items()}


def read_weights(path: Path) -> Json:
    """The number of parameters and the sum of their absolute values."""
    tensors = load_file(path)
    floats = [np.abs(v.astype(np.float64)) for v in tensors.values() if v.dtype == np.float32]
    sums = {"parameters": sum(v.size for v in floats), "sum_of_abs": sum(float(v.sum()) for v in floats)}
    return {"tensors": len(tensors), **sums}


def read_trec(path: Path) -> Json:
    """A digest of queries, documents and ranks; the sum of the scores."""
    fields = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    digest = hashlib.sha256("\n".join(" ".join(f[:4]) for f in fields).encode()).hexdigest()[:12]
    scores = {"scores": sum(float(f[4]) for f in fields)} if len(fields[0]) == 6 else {}
    return {"lines": len(fields), "digest": digest, **scores}


READERS: dict[str, Callable[[Path], Json]] = {
    **dict.fromkeys(
        ("results.json", "start.json", "mmclip.json", "advise.json", "sts.json", "benchmark.json"), read_json
    ),
    "metrics.jsonl": read_lines,
    ".npz": read_arrays,
    ".csv": read_csv,
    ".safetensors": read_weights,
    ".trec": read_trec,
}


# --- data -------------------------------------------------------------------------------------------------------------


def draw(r: Recorder) -> None:
    """Have the built-in scenes and classes drawn in ``r.data``."""
    if not all((r.data / n / "test" / "0.tar").is_file() for n in ("scenes", "scenes-classes")):
        r.run("train_clip.py --train-data builtin:scenes --zeroshot-data builtin:scenes-classes --benchmark 1")


def digest_scenes(r: Recorder) -> None:
    """Record a digest of each file of the built-in data; of a tar's members, without their dates."""
    for name in ("scenes", "scenes-classes"):
        found = r.facts[f"{r.section}/{name}"] = {}
        for path in sorted(p for p in (r.data / name).rglob("*") if p.is_file()):
            content = path.read_bytes()
            if path.suffix == ".tar":
                with tarfile.open(path) as tar:
                    content = b"".join(m.name.encode() + tar.extractfile(m).read() for m in tar if m.isfile())
            found[str(path.relative_to(r.data / name))] = hashlib.sha256(content).hexdigest()[:12]


def make_clip(r: Recorder) -> None:
    """The {data}, {classes} and {model} of the tests: 96, 24 and 20 pictures, 6 classes, one layer a tower."""
    from tests.helpers import benchmarking, tiny

    folder = r.here / "small"
    folder.mkdir()
    r.places |= {"data": tiny.make_data(folder), "model": tiny.make_model(folder)}
    r.places["classes"] = benchmarking.make_classes(folder / "classes")


def make_text(r: Recorder) -> None:
    """A {beir} collection, a one-layer {encoder}, and scored sentence {pairs}."""
    from tests.helpers import texts

    r.places["beir"] = texts.make_beir(r.here / "beir", 120, 120)
    r.places["encoder"] = texts.make_bert(r.here / "encoder")
    r.places["pairs"] = r.here / "pairs.tsv"
    rng, rows = np.random.RandomState(5), ["score\tsentence1\tsentence2"]
    for i in range(90):
        words = rng.choice(texts.WORDS, 10, replace=False)
        rows.append(f"{i % 6}\t{' '.join(words[:5])}\t{' '.join(words[5 - i % 6 : 10 - i % 6])}")
    (r.here / "pairs.tsv").write_text("\n".join(rows) + "\n")


def link_runs(r: Recorder) -> None:
    """Give the runs of a study stable names: their folders' hold a digest of settings, paths among them."""
    for path in sorted(r.here.glob("logs/*/runs/**/results.json")):
        results = json.loads(path.read_text())
        trained = results["trained_with"]
        if results["seed"] == 0 and not trained["data"]["permuted_pairs"] and not trained.get("initial"):
            (r.here / f"{trained['loss']}-{trained['norm']}").symlink_to(path.parent)


def make_vectors(r: Recorder) -> None:
    """{planted}, as of an asym-i2t/qnorm model, and {bank}.

    Three captions a picture, tied copies among them, informative norms, a caption of two pictures, distractors of both
    sides. All numbers are multiples of 1/64, so that ties are ties in any order of sums.
    """
    rng, rows, n = np.random.RandomState(11), np.arange(240), 80
    facts = {"loss": "asym-i2t", "norm": "qnorm", "i2t_weight": 1.0, "gamma_q": 1.0, "gamma_d": 0.0}
    meta = json.dumps({"model": "planted", "facts": facts, "alpha": {"i2t": 3.0, "t2i": None}})

    def grid(x: Any) -> Any:
        return (np.round(x * 64) / 64).astype(np.float32)

    def write(name: str, image: Any, text: Any, **more: Any) -> None:
        names = [f"{name}{i}" for i in range(len(text))]
        images = names[: len(image)]
        more |= {"image_ids": images, "text_ids": names, "text_image_ids": np.repeat(images, 3)}
        r.places[name] = r.here / f"{name}.npz"
        np.savez(r.here / name, image=grid(image), text=grid(text), meta=np.frombuffer(meta.encode(), np.uint8), **more)

    image = rng.normal(0, 1, (2 * n, 16))
    text = image[np.arange(6 * n) // 3] + rng.normal(0, 0.6, (6 * n, 16))
    text *= np.tile([1.5, 1.0, 0.75], 2 * n)[:, None]
    write("bank", image[n:], text[3 * n :])
    image[1:n:10], text[5 : 3 * n : 30] = image[:n:10], text[2 : 3 * n : 30]
    more = {"pairs": np.concatenate([np.stack([rows // 3, rows], 1), [[3, 0], [4, 0], [9, 31]]])}
    more["captions"] = np.array([" ".join(["word"] * (1 + i % 5)) + f" {i}" for i in rows])
    more["levels"] = np.array(["full", "partial", "vague"])[rows % 3]
    more["n_objects"], more["distractor_owner"] = 1 + np.arange(n) % 4, np.repeat(np.arange(20), 2)
    more["distractor_image"] = grid(rng.normal(0, 1, (20, 16)))
    more["distractor_text"] = grid(rng.normal(0, 0.7, (40, 16)))
    write("planted", image[:n], text[: 3 * n], **more)


# --- comparison -------------------------------------------------------------------------------------------------------


def kind_of(file: str, key: str) -> tuple[str, bool]:
    """("rate", "loss" or "other", whether it is an interval)."""
    parts = key.split("/")
    interval = "ci" in parts or bool(re.search(r"(_lo|_hi|_low|_high)$", parts[-1]))
    if any(RATE.match(re.sub("^(val_)?([a-z0-9]{3}_)?", "", p)) for p in parts):
        return "rate", interval
    return "loss" if "loss" in key and file.endswith("metrics.jsonl") else "other", interval


def digits(file: str, key: str) -> int:
    kind, interval = kind_of(file, key)
    return DIGITS["loss" if kind == "other" and interval else kind]


def equal(x: Any, y: Any, file: str, key: str) -> bool:
    if type(x) is type(y) and x == y:
        return True
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in (x, y)) or type(x) is type(y) is int:
        return False
    kind, interval = kind_of(file, key)
    relative = 0.0 if kind == "rate" else 1e-6 if kind == "loss" or interval else 1e-5
    return math.isclose(x, y, rel_tol=relative, abs_tol=1e-6 if kind == "loss" else 1e-9)


def differences(old: Facts, new: Facts) -> Iterator[tuple[str, str, str]]:
    """("missing", "new" or "changed", file, what)."""
    for file in dict.fromkeys([*old, *new]):
        a, b = old.get(file, {}), new.get(file, {})
        for key in dict.fromkeys([*a, *b]):
            if key not in a or key not in b:
                yield "new" if key in b else "missing", file, key
                continue
            x, y = (v if isinstance(v, list) else [v] for v in (a[key], b[key]))
            if len(x) != len(y):
                yield "changed", file, f"{key}: {len(x)} entries, now {len(y)}"
            for i, (u, v) in enumerate(zip(x, y, strict=False)):
                if not equal(u, v, file, key):
                    yield "changed", file, f"{key}[{i}]: {u!r} -> {v!r}"


def report(found: list[tuple[str, str, str]], most: int = 12) -> None:
    """Print differences by kind and file, the first ``most`` of each file."""
    for kind in ("missing", "new", "changed"):
        of_kind = [d for d in found if d[0] == kind]
        files = dict.fromkeys(file for _, file, _ in of_kind)
        if of_kind:
            print(f"\n{kind.upper()}: {len(of_kind)} in {len(files)} files")
        for file in files:
            lines = [what for _, f, what in of_kind if f == file]
            print("\n    ".join([f"  {file}", *lines[:most], *[f"and {len(lines) - most} more"] * (len(lines) > most)]))


def versions() -> Json:
    """Not compared, but may explain other last digits."""
    names = ("torch", "numpy", "open_clip_torch", "transformers", "sentence-transformers", "pillow", "scipy")
    cpu = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpu.read_text()) if cpu.is_file() else None
    return {"python": sys.version.split()[0], **{n: version(n) for n in names}, "cpu": model and model[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("freeze", "compare"))
    parser.add_argument("--full", action="store_true", help="the long sections instead")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="compare these sections only")
    parser.add_argument(
        "--golden", type=Path, metavar="FILE", help="[tests/golden/golden_quick.json or golden_full.json]"
    )
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout whose scripts run [this one]")
    parser.add_argument("--work", type=Path, help="where they run [logs/golden/quick or full]")
    args = parser.parse_args()
    if any(os.environ.get(k) != v for k, v in THREADS.items()):  # numpy and torch read them when they are imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **THREADS})
    level = "full" if args.full else "quick"
    golden = args.golden or HERE / "golden" / f"golden_{level}.json"
    sections = yaml.safe_load((HERE / "golden" / "runs.yaml").read_text(encoding="utf-8"))[level]
    if wrong := set(args.only or []) - set(sections):
        parser.error(f"no section {', '.join(sorted(wrong))}; valid: {', '.join(sections)}")
    if args.only and args.what == "freeze":
        parser.error("--only is for compare: a file is frozen whole")
    work = (args.work or HERE.parent / "logs" / "golden" / level).resolve()
    work.mkdir(parents=True, exist_ok=True)
    data = work / "data" if args.full else HERE.parent / "data"
    if args.full and (not args.only or "scenes" in args.only):
        shutil.rmtree(data, ignore_errors=True)
    recorder = Recorder(args.root.resolve(), work, data)
    chosen = [name for name in args.only or sections if name != "minilm" or recorder.shared]
    for name in chosen:
        print(f"{name}:", flush=True)
        recorder.record(name, sections[name])
    facts = json.loads(json.dumps(recorder.facts))
    if args.what == "freeze":
        golden.write_text(json.dumps({"about": versions(), "facts": facts}, indent=0, ensure_ascii=False), "utf-8")
        return
    frozen = json.loads(golden.read_text(encoding="utf-8"))
    known = {k: v for k, v in frozen["facts"].items() if k.split("/")[0] in chosen}
    found = list(differences(known, facts))
    if not found:
        print(f"equal to {golden.name}: {sum(map(len, facts.values()))} values of {len(facts)} files")
        return
    report(found)
    if other := [
        f"{k} {frozen['about'].get(k)}, here {v}" for k, v in versions().items() if frozen["about"].get(k) != v
    ]:
        print(f"\nfrozen with {'; '.join(other)}")
    sys.exit(1)


if __name__ == "__main__":
    main()
