#!/usr/bin/env python3
"""Numbers that a rebuild of the package must leave as they are. A program of its own, which pytest does not collect:

    python tests/golden.py compare                    # minutes: tiny runs of every kind, a small study
    python tests/golden.py compare --full             # an hour: make demo, the scenes study, MiniLM where it is there
    python tests/golden.py compare --only text study  # some sections
    python tests/golden.py freeze [--full]            # write tests/golden/golden_quick.json (_full) anew, on purpose

Only command lines are run, as processes, and only what they leave is read: results.json, start.json, metrics.jsonl,
per_query.npz, weights, CSV tables, TREC files, and what a comparison prints. --root names another checkout whose
scripts are run. compare prints what is missing, what is new and what has changed, and exits with 1 where anything did.
The quick runs are forked from a process that has imported torch and other people's packages, nothing of ours; --cold
starts them as a person does, six seconds more each.

Ranks, rates, counts and words are compared exactly, losses to 1e-6, intervals of rates to 1e-9, other intervals to
1e-6, other numbers to 1e-5. Frozen on one thread: how many there are decides the order of sums. Another processor or
another torch may end in other last digits, which training makes visible ones: then freeze the tree of before there
(--root) into another file, and compare with that (--golden).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]

# Where and when a number was made, and how long it took, is nobody's behaviour
SKIPPED = {"path", "versions", "seconds", "samples_per_second", "pairs_per_second", "data_wait", "took", "date"}
RATE = re.compile(r"^(success|recall|mrr|ndcg|r|p)@\d+|^(map|(median|mean|first)_rank|tied_queries|acc1|chance)$")
DIGITS = {"rate": 10, "loss": 9, "other": 7}  # significant ones that are kept
# What is kept of results.json: everything; all sets of candidates, the smaller ones by their main numbers; one set
POOLS = re.compile(r"^(?!pools/[^/]+/(diagnostics|retrieval/.../(dot|qnorm|dnorm)|.*/(ci|by_|quantiles)))")
MAIN = re.compile(r"^(?!pools/|diagnostics/|fingerprint/|.*/(by_|quantiles))")
ALL = re.compile("")
PRELOADED = ("torch", "torchvision", "open_clip", "scipy.stats", "matplotlib.figure", "jinja2", "rich.progress",
             "sentence_transformers", "datasets")  # fmt: skip

TINY_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
STUDY = """title: Small
config: scenes
model: {model}
train_data: {data}
zeroshot_data: {classes}
seeds: [0]
epochs: 3
batch_size: 32
lr: 2e-3
val_steps: 1000000
log_every_n_steps: 3
workers: 0
device: cpu
arms:
  - {{loss: sym, norm: cosine, seeds: [0, 1]}}
  - {{loss: sym, norm: qnorm}}
  - {{loss: asym-i2t, norm: qnorm, seeds: [0, 1]}}
  - {{loss: asym-i2t, norm: cosine}}
  - {{loss: asym-t2i, norm: [qnorm, cosine]}}
  - {{name: fine-tuned, loss: [asym-i2t], norm: [qnorm], init_from: sym cosine, lr: 5e-4, epochs: 2}}
  - {{name: permuted, loss: [asym-i2t], norm: [qnorm, cosine], permute_pairs: true, epochs: 2}}
"""


THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
STARTERS = ("run_study.py", "demo.py")  # which only start others


class Job:
    """A script in a process of its own, its output in files; warm: forked, with others' packages imported."""

    def __init__(self, command: list[str], cwd: Path, environment: dict[str, str], out: Path, warm: bool) -> None:
        self.process = None
        if not warm:
            with open(out, "w") as o, open(f"{out}.err", "w") as e:
                self.process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=o, stderr=e)
            return
        sys.stdout.flush()
        self.pid, self.code = os.fork(), None
        if self.pid == 0:
            for descriptor, name in ((1, str(out)), (2, f"{out}.err")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            script = command[1:]
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = script
            sys.path[:] = [str(Path(script[0]).parent), environment["PYTHONPATH"], *sys.path[1:]]
            code = 1
            try:
                runpy.run_path(script[0], run_name="__main__")
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
                if isinstance(error.code, str):
                    print(error.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.process is not None:
            return self.process.poll()
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def stop(self) -> None:
        os.kill(self.pid if self.process is None else self.process.pid, signal.SIGTERM)


class Shop:
    """Runs scripts of ``root`` in ``work`` and gathers facts: {"section/what/file": {key: number, text or list}}."""

    def __init__(self, root: Path, work: Path, data: Path, shared: Path | None, jobs: int, warm: bool) -> None:
        self.root, self.work, self.data, self.shared, self.jobs, self.warm = root, work, data, shared, jobs, warm
        self.started = 0
        self.facts: dict[str, Json] = {}
        self.section = ""
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MMCLIP", "TORCH", "COLUMNS"))},
            "PYTHONPATH": str(root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MMCLIP_DATA": str(data),
            **THREADS,
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "250",
        }

    # --- running

    def require_own_package(self) -> None:
        """The scripts must not find another checkout's package, which an editable install would give them."""
        code = "import importlib.util as u; print(u.find_spec('mmclip').origin)"
        command = [sys.executable, "-c", code]
        found = subprocess.run(command, cwd=self.work, env=self.environment, capture_output=True, text=True, check=True)
        if not Path(found.stdout.strip()).is_relative_to(self.root):
            sys.exit(f"{self.root}: its scripts would import {found.stdout.strip()}")

    @property
    def folder(self) -> Path:
        return self.work / self.section

    def command(self, script: str, *arguments: object, ranks: int = 1) -> list[str]:
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
        return [*start, str(self.root / "scripts" / script), *map(str, arguments)]

    def start(self, script: str, *arguments: object, ranks: int = 1) -> tuple[Job, Path, str]:
        """(the job, where its output goes, what it is called)."""
        self.started += 1
        out = self.folder / f"{self.started:02d}-{script.removesuffix('.py')}.txt"
        command = self.command(script, *arguments, ranks=ranks)
        named = arguments.index("--name") + 1 if "--name" in arguments else 1
        said = f"{script} {arguments[named]}".replace(str(self.folder), "…")
        job = Job(command, self.folder, self.environment, out, self.warm and ranks == 1 and script not in STARTERS)
        return job, out, said

    def run(self, script: str, *arguments: object, ranks: int = 1) -> str:
        """Its stdout. A script that fails ends it all."""
        began = time.monotonic()
        job, out, said = self.start(script, *arguments, ranks=ranks)
        if code := job.wait():
            sys.exit(f"{Path(f'{out}.err').read_text()[-6000:]}\n{said}\nfailed with {code}; see {out}")
        print(f"  {time.monotonic() - began:5.0f} s  {said[:150]}", flush=True)
        return out.read_text(encoding="utf-8")

    def stop(self, lines: int, run: Path, script: str, *arguments: object) -> None:
        """Run it, and send SIGTERM as soon as its metrics.jsonl has so many lines; again where it was done before."""
        metrics = run / "metrics.jsonl"
        for _ in range(5):
            shutil.rmtree(run, ignore_errors=True)
            job, out, _said = self.start(script, *arguments)
            while job.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") >= lines):
                time.sleep(0.01)
            if job.poll() is None:
                job.stop()
            if job.wait() != 0 and "--resume latest" in Path(f"{out}.err").read_text(encoding="utf-8"):
                return
        sys.exit(f"{script} does not stop in time, or does not say how to go on; see {out} and {out}.err")

    # --- reading

    def take(self, name: str, folder: Path, keys: re.Pattern[str] = ALL) -> None:
        """Everything that lies in a run's, an evaluation's or a study's folder; of results.json the keys that match."""
        before = len(self.facts)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            inner = path.relative_to(folder)
            if {"checkpoints", "runs" if (folder / "study.json").is_file() else "", "settings"} & set(inner.parts[:-1]):
                continue
            reader = READERS.get(path.name) or READERS.get(path.suffix)
            if reader is not None and (found := reader(path)):
                if path.suffix == ".json":
                    wanted = MAIN if path.name == "start.json" or "evaluations" in inner.parts else keys
                    found = {k: v for k, v in found.items() if wanted.match(k)}
                where = f"{self.section}/{name}/{inner}"
                self.facts[where] = {k: self.clean(v, digits(where, k)) for k, v in found.items()}
        if len(self.facts) == before:
            sys.exit(f"{folder}: nothing there to keep")

    def told(self, name: str, text: str) -> None:
        """What a script printed: its lines, without frames and places."""
        lines = (" ".join(re.sub(r"[─━│┃┏┓┗┛┌┐└┘├┤┬┴┼═]", " ", line).split()) for line in text.splitlines())
        self.facts[f"{self.section}/{name}"] = {"lines": [self.clean(line) for line in lines if line]}

    def clean(self, value: Any, kept: int = 17) -> Any:
        """Places taken out of texts; floats to as many digits as are kept."""
        if isinstance(value, list):
            return [self.clean(v, kept) for v in value]
        if isinstance(value, str):
            for place, name in ((self.work, "WORK"), (self.data, "DATA"), (self.root, "ROOT"), (self.shared, "SHARED")):
                value = value.replace(str(place), name)
            return value
        if isinstance(value, float):
            value = float(f"{value:.{kept}g}") if abs(value) > 1e-12 else 0.0
            return int(value) if value.is_integer() and abs(value) < 1e15 else value
        return value


# --- what is read of a file: {key: scalar or list of scalars} ---------------------------------------------------------


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
    """Of metrics.jsonl, a list each key, null where a line has none."""
    lines = [dict(flatten(json.loads(line))) for line in path.read_text(encoding="utf-8").splitlines()]
    return {key: [line.get(key) for line in lines] for key in dict.fromkeys(k for line in lines for k in line)}


def read_csv(path: Path) -> Json:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    heads = rows[0] if rows else []
    columns = {h: [number(row[i]) for row in rows[1:]] for i, h in enumerate(heads) if not SKIPPED & set(h.split("_"))}
    return {"(rows)": len(rows) - 1, **columns}


def number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def read_arrays(path: Path) -> Json:
    """Of whole numbers and rates a digest each group of arrays (POOL/DIRECTION/SCORING); sums of other floats."""
    found: Json = {}
    groups: dict[str, list[tuple[str, Any]]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in sorted(arrays.files):
            array, last = arrays[name], name.rsplit("/", 1)[-1]
            if array.dtype.kind in "iub" or RATE.match(last):
                groups.setdefault(name.rsplit("/", 1)[0], []).append((last, array))
            else:
                found[f"{name}/sum_of_abs"] = float(np.abs(array.astype(np.float64)).sum())
                found[f"{name}/n"] = array.size
    for group, members in groups.items():
        whole = hashlib.sha256()
        for name, array in members:
            if array.dtype.kind == "f":  # a rate's last digits are no rank
                array = np.round(array.astype(np.float64), 6) + 0.0
            whole.update(f"{name} {array.shape}".encode() + array.astype(np.float64).tobytes())
        found[f"{group}/digest"] = whole.hexdigest()[:12]
    return found


def read_weights(path: Path) -> Json:
    """The model's parameters: how many, and the sum of their absolute values."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    head = json.loads(raw[8 : 8 + size])
    head.pop("__metadata__", None)
    total, n = 0.0, 0
    for about in head.values():
        if about["dtype"] == "F32":
            begin, end = (8 + size + x for x in about["data_offsets"])
            values = np.frombuffer(raw[begin:end], dtype="<f4").astype(np.float64)
            total, n = total + float(np.abs(values).sum()), n + values.size
    return {"tensors": len(head), "parameters": n, "sum_of_abs": total}


def read_trec(path: Path) -> Json:
    """Queries, documents and ranks to the letter; the sum of the scores."""
    fields = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    is_run = len(fields[0]) == 6
    listed = "\n".join(" ".join(f[:4]) for f in fields)
    scores = {"scores": sum(float(f[4]) for f in fields)} if is_run else {}
    return {"lines": len(fields), "digest": hashlib.sha256(listed.encode()).hexdigest()[:12], **scores}


READERS: dict[str, Callable[[Path], Json]] = {
    "results.json": read_json,
    "start.json": read_json,
    "mmclip.json": read_json,
    "metrics.jsonl": read_lines,
    "advise.json": read_json,
    "sts.json": read_json,
    "benchmark.json": read_json,
    ".npz": read_arrays,
    ".csv": read_csv,
    ".safetensors": read_weights,
    ".trec": read_trec,
}


# --- data and models that are made on the spot, without the package ---------------------------------------------------


def drawn(shop: Shop) -> None:
    """The built-in scenes and classes in ``shop.data``, drawn by whatever first asks for them."""
    if not all((shop.data / n / "test" / "0.tar").is_file() for n in ("scenes", "scenes-classes")):
        shop.run("train_clip.py", "--train-data", "builtin:scenes", "--zeroshot-data", "builtin:scenes-classes",
                 "--device", "cpu", "--workers", 0, "--benchmark", 1)  # fmt: skip


def digest_of(folder: Path) -> Json:
    """Of every file of a data set: a tar's members, since its dates do not matter."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        whole = hashlib.sha256()
        if path.suffix == ".tar":
            with tarfile.open(path) as tar:
                for member in tar:
                    opened = tar.extractfile(member)
                    whole.update(member.name.encode() + (opened.read() if opened else b""))
        else:
            whole.update(path.read_bytes())
        found[str(path.relative_to(folder))] = whole.hexdigest()[:12]
    return found


def shrink(source: Path, target: Path, splits: dict[str, Callable[[int], bool]]) -> Path:
    """A data set of those samples of the first shard of each split whose number is wanted."""
    for split, wanted in splits.items():
        (target / split).mkdir(parents=True)
        (target / split / "nshards.txt").write_text("1\n")
        with tarfile.open(source / split / "0.tar") as old, tarfile.open(target / split / "0.tar", "w") as new:
            numbers: dict[str, int] = {}
            for member in old:
                if wanted(numbers.setdefault(member.name.split(".")[0], len(numbers))):
                    new.addfile(member, old.extractfile(member))
        keys = {key for key, n in numbers.items() if wanted(n)}
        if (truth := source / split / "truth.jsonl").is_file():
            lines = [json.loads(line) for line in truth.read_text().splitlines()]
            for line in lines:
                for caption in line["captions"]:
                    if "relevant" in caption:
                        caption["relevant"] = [k for k in caption["relevant"] if k in keys]
            kept = [json.dumps(line) + "\n" for line in lines if line["key"] in keys]
            (target / split / "truth.jsonl").write_text("".join(kept))
    for path in source.glob("*.txt"):
        shutil.copy(path, target)
    return target


def small_scenes(folder: Path, data: Path) -> tuple[Path, Path, Path]:
    """(scenes of 192, 60 and 30 pictures, classes of 84, a model of a layer a tower)."""
    sizes = {"train": 192, "test": 60, "distractors": 30}
    splits = {name: lambda i, n=n: i < n for name, n in sizes.items()}
    scenes = shrink(data / "scenes", folder / "small" / "scenes", splits)
    classes = shrink(data / "scenes-classes", folder / "small" / "classes", {"test": lambda i: i % 10 == 3})
    model = folder / "small" / "tiny.json"
    model.write_text(json.dumps(TINY_CLIP))
    return scenes, classes, model


SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "no", "pi", "ru")
WORDS = [a + b for a in SYLLABLES for b in ("ck", "l", "mp", "nd", "r", "st")]


def make_beir(folder: Path, queries: int = 48, documents: int = 90) -> Path:
    """A query is three words, which its relevant documents begin with; some have two, of gains 1 and 2."""
    rng = random.Random(7)
    texts = [rng.choices(WORDS, k=8) for _ in range(documents)]
    asked, judged = [], {"train": [], "test": []}
    for q in range(queries):
        words = rng.sample(WORDS, 3)
        asked.append({"_id": f"q{q}", "text": " ".join(words)})
        for gain, d in enumerate([2 * q % documents, (2 * q + 1) % documents][: 1 + (q % 3 == 0)], 1):
            texts[d][:3] = words
            judged["test" if q % 3 == 1 else "train"].append(f"q{q}\td{d}\t{gain}\n")
    corpus = [{"_id": f"d{d}", "title": t[0], "text": " ".join(t)} for d, t in enumerate(texts)]
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", corpus), ("queries", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, lines in judged.items():
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def make_encoder(folder: Path, width: int = 32) -> Path:
    """A sentence-transformers folder: a BERT of one layer over whole words, mean pooling, Normalize. No torch is asked
    for random numbers: another release of it would draw others."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{n.lower()}_token": f"[{n}]" for n in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    layer, dense = "encoder.layer.0.", ("attention.self.query", "attention.self.key", "attention.self.value")
    shapes = {layer + name: (width, width) for name in (*dense, "attention.output.dense")}
    shapes |= {layer + "intermediate.dense": (2 * width, width), layer + "output.dense": (width, 2 * width)}
    shapes |= {"pooler.dense": (width, width)}
    tables = {"word": len(tokens), "position": 64, "token_type": 2}
    rng = np.random.RandomState(3)
    weights = {f"embeddings.{name}_embeddings.weight": rng.normal(0, 0.2, (n, width)) for name, n in tables.items()}
    for name, shape in shapes.items():
        weights |= {f"{name}.weight": rng.normal(0, 0.2, shape), f"{name}.bias": np.zeros(shape[0])}
    for name in ("embeddings", layer + "attention.output", layer + "output"):  # all ones would make all lengths equal
        scale = {f"{name}.LayerNorm.weight": rng.uniform(0.5, 1.5, width), f"{name}.LayerNorm.bias": np.zeros(width)}
        weights |= scale
    weights = {k: v.astype(np.float32) for k, v in weights.items()}
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files: dict[str, Any] = {
        "config.json": {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": len(tokens)}
        | {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * width}
        | {"max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **special},
        "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
        "modules.json": [
            {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{k}"}
            for i, (p, k) in enumerate(kinds)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
        | {f"pooling_mode_{k}": False for k in ("cls_token", "max_tokens", "mean_sqrt_len_tokens")},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "2_Normalize").mkdir()
    return folder


def make_vectors(folder: Path) -> tuple[Path, Path]:
    """(planted embeddings, a bank): three captions a picture, among them copies that tie, lengths that say something,
    a caption of two pictures, distractors of both sides; scored as an asym-i2t/qnorm model is. All numbers are
    multiples of 1/64, so that ties are ties however they are summed."""
    rng = np.random.RandomState(11)
    n, dim, each = 80, 16, 3

    def grid(x: Any) -> Any:
        return (np.round(x * 64) / 64).astype(np.float32)

    def captions_of(image: Any) -> Any:
        noise = rng.normal(0, 0.6, (len(image) * each, dim))
        length = np.tile([1.5, 1.0, 0.75], len(image))[:, None]
        return grid((np.repeat(image, each, 0) + noise) * length)

    image = grid(rng.normal(0, 1, (n, dim)))
    text = captions_of(image)
    image[1::10] = image[::10]  # two pictures alike
    text[5::30] = text[2::30]  # captions alike, of two pictures
    owner = np.repeat(np.arange(n), each)
    pairs = np.concatenate([np.stack([owner, np.arange(len(owner))], 1), [[3, 0], [4, 0], [9, 31]]])
    facts = {"loss": "asym-i2t", "norm": "qnorm", "i2t_weight": 1.0, "gamma_q": 1.0, "gamma_d": 0.0}
    meta = json.dumps({"model": "planted", "facts": facts, "alpha": {"i2t": 3.0, "t2i": None}})
    arrays = {
        "image_ids": np.array([f"i{i}" for i in range(n)]),
        "text_ids": np.array([f"t{i}" for i in range(len(text))]),
        "text_image_ids": np.array([f"i{i}" for i in owner]),
        "pairs": pairs,
        "captions": np.array([" ".join(["word"] * (1 + i % 5)) + f" {i}" for i in range(len(text))]),
        "levels": np.array([("full", "partial", "vague")[i % 3] for i in range(len(text))]),
        "n_objects": 1 + np.arange(n) % 4,
        "distractor_image": grid(rng.normal(0, 1, (20, dim))),
        "distractor_text": grid(rng.normal(0, 0.7, (40, dim))),
        "distractor_owner": np.repeat(np.arange(20), 2),
        "meta": np.frombuffer(meta.encode(), dtype=np.uint8),
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "planted.npz", image=image, text=text, **arrays)
    others = grid(rng.normal(0, 1, (50, dim)))
    ids = {
        "image_ids": [f"b{i}" for i in range(50)],
        "text_ids": [f"c{i}" for i in range(50 * each)],
        "text_image_ids": [f"b{i // each}" for i in range(50 * each)],
    }
    np.savez(folder / "bank.npz", image=others, text=captions_of(others), meta=arrays["meta"], **ids)
    return folder / "planted.npz", folder / "bank.npz"


# --- sections of --quick ----------------------------------------------------------------------------------------------


def scenes(shop: Shop) -> None:
    """The built-in data, to the letter. Delete data/ to have them drawn anew; --full always does."""
    drawn(shop)
    for name in ("scenes", "scenes-classes"):
        shop.facts[f"scenes/{name}"] = digest_of(shop.data / name)


def clip(shop: Shop) -> None:
    """Trainings: one that is stopped and resumed, one that is extended, a curriculum, frozen trunks, two ranks; then
    evaluations of the first on its own, on foreign and on built-in data."""
    drawn(shop)
    data, classes, model = small_scenes(shop.folder, shop.data)
    logs = shop.folder / "logs"
    common = ["--train-data", data, "--model", model, "--logs", logs, "--workers", 0, "--device", "cpu", "--lr", "2e-3",
              "--batch-size", 32, "--log-every-n-steps", 1, "--no-report"]  # fmt: skip
    qnorm = [*common, "--loss", "asym-i2t", "--norm", "qnorm", "--epochs", 4, "--val-steps", 8]

    whole = [*qnorm, "--measure-start", "--zeroshot-data", classes]
    shop.run("train_clip.py", *whole, "--name", "qnorm")
    shop.take("qnorm", logs / "qnorm", POOLS)

    cut = [*whole, "--name", "cut"]
    shop.stop(5, logs / "cut", "train_clip.py", *cut)
    shop.run("train_clip.py", *cut, "--resume", "latest")
    same(shop, "cut", "qnorm", logs / "cut", POOLS)

    shop.run("train_clip.py", *qnorm, "--name", "extended", "--max-steps", 5, "--bank-size", 0)
    longer = ["--resume", "latest", "--may-change", "max_steps", "lr", "--lr", "1e-3", "--max-steps", 9]
    shop.run("train_clip.py", *qnorm, "--name", "extended", "--bank-size", 0, *longer)
    shop.take("extended", logs / "extended", MAIN)

    shop.run("train_clip.py", *common, "--name", "curriculum", "--loss", "sym", "--norm", "dot", "--epochs", 2,
             "--i2t-weight", 0.8, "--i2t-weight-end", 0.3, "--gamma-schedule", "anneal", "--focal", 1, "--norm-drift",
             0.1, "--positives", "multi", "--accum-freq", 2, "--keep-last", "--grad-clip-norm", 1, "--seed", 3,
             "--val-holdout", 40, "--aug-cfg", "scale=0.8,1.0")  # fmt: skip
    shop.take("curriculum", logs / "curriculum", MAIN)

    shop.run("train_clip.py", *common, "--name", "heads", "--loss", "asym-t2i", "--norm", "learned", "--epochs", 3,
             "--lock-image", "--lock-text", "--cache-features", "--cache-dir", shop.folder / "cache", "--gamma-lr",
             0.05, "--train-fraction", 0.5, "--precision", "fp32")  # fmt: skip
    shop.take("heads", logs / "heads", MAIN)

    shop.run("train_clip.py", *common, "--name", "ranks", "--loss", "asym-i2t", "--norm", "learned", "--epochs", 2,
             "--batch-size", 10, "--loss-batch-size", 42, "--keep-last", "--bank-size", 40, ranks=2)  # fmt: skip
    shop.take("ranks", logs / "ranks", MAIN)

    told = ["--workers", 0, "--device", "cpu", "--no-report"]
    where = shop.folder / "evaluated"
    shop.run("evaluate.py", "--model", logs / "qnorm", "--data", data, "--bank", data, "--bank-size", 100, "--seed", 5,
             "--distractors", "blank", "noise", "blurred", "shuffled", "boilerplate", "shuffled-words", "--block-bytes",
             2**20, "--output", where, *told)  # fmt: skip
    shop.take("evaluated", where, POOLS)


def same(shop: Shop, name: str, as_: str, folder: Path, keys: re.Pattern[str]) -> None:
    """Nothing more is kept of a run that must be another one's equal than whether it is."""
    before = shop.facts
    shop.facts = {}
    shop.take(name, folder, keys)
    found, shop.facts = shop.facts, before
    other = {k: v for k, v in before.items() if k.startswith(f"{shop.section}/{as_}/")}
    renamed = {k.replace(f"/{name}/", f"/{as_}/", 1): v for k, v in found.items()}
    differing = differences(other, renamed, exact=True)
    shop.facts[f"{shop.section}/{name}"] = {f"differs from {as_}": [f"{d[1]}: {d[2]}" for d in differing][:20]}


def text(shop: Shop) -> None:
    """Trainings of a tiny text encoder by two norms, and by gradient caching of both directions; their evaluation."""
    data, model, logs = make_beir(shop.folder / "beir"), make_encoder(shop.folder / "encoder"), shop.folder / "logs"
    common = ["--model", model, "--train-data", data, "--val-data", data, f"{data}:train", "--logs", logs, "--device",
              "cpu", "--batch-size", 8, "--epochs", 3, "--lr", "1e-3", "--watch-queries", 6]  # fmt: skip
    shop.run("train_text.py", *common, "--norm", "qnorm", "--name", "qnorm")
    shop.run("train_text.py", *common, "--norm", "cosine", "--name", "cosine", "--no-measure-start")
    shop.run("train_text.py", *common, "--norm", "learned", "--name", "both", "--no-measure-start", "--loss", "both",
             "--q2d-weight", 0.7, "--mini-batch-size", 4, "--focal", 1, "--norm-drift", 0.1, "--learn-scale",
             "--positives", "multi", "--seed", 2)  # fmt: skip
    for name in ("qnorm", "cosine", "both"):
        shop.take(name, logs / name, ALL if name == "qnorm" else MAIN)
    where = shop.folder / "evaluated"
    shop.run("evaluate_text.py", "--model", logs / "qnorm", "--data", data, "--output", where, "--run-depth", 20,
             "--fisher", "--device", "cpu")  # fmt: skip
    shop.take("evaluated", where)
    told = shop.run("evaluate_text.py", "--compare", logs / "qnorm", logs / "cosine", logs / "both", "--control",
                    logs / "cosine", "--baseline", logs / "cosine")  # fmt: skip
    shop.told("compared", told)
    files = [where / "runs" / f"{scoring}.trec" for scoring in ("dot", "cosine")]
    shop.told("run files", shop.run("evaluate_text.py", "--data", data, "--run", *files))


def embeddings(shop: Shop) -> None:
    """Saved vectors with ties, several captions a picture, distractors, a bank; every diagnostic of them."""
    planted, bank = make_vectors(shop.folder / "vectors")
    for name, more in (("no bank", []), ("bank", ["--bank", bank, "--bank-size", 60, "--seed", 4])):
        where = shop.folder / name.replace(" ", "-")
        shop.run("evaluate.py", "--embeddings", planted, *more, "--output", where, "--no-report")
        shop.take(name, where, MAIN if name == "no bank" else POOLS)
    shop.run("diagnose.py", "--embeddings", planted, "--bank", "transductive", "--output", shop.folder / "diagnosed",
             "--block-bytes", 2**20, "--no-report")  # fmt: skip
    shop.take("diagnosed", shop.folder / "diagnosed", POOLS)


def study(shop: Shop) -> None:
    """Arms of every kind of configs/study_scenes.yaml on few small pictures, and a comparison of its runs."""
    drawn(shop)
    data, classes, model = small_scenes(shop.folder, shop.data)
    file = shop.folder / "study_small.yaml"
    file.write_text(STUDY.format(data=data, classes=classes, model=model))
    shop.run("run_study.py", "--config", file, "--logs", shop.folder / "logs", "--jobs", shop.jobs)
    (folder,) = (p.parent for p in shop.folder.glob("logs/*/study.json"))
    shop.take("tables", folder)
    runs = {}
    for path in sorted(folder.rglob("results.json")):
        about = json.loads(path.read_text())
        trained = about["trained_with"]
        if about["seed"] == 0 and not trained["data"]["permuted_pairs"] and not trained.get("initial"):
            runs[f"{trained['loss']}-{trained['norm']}"] = path.parent
    named = ("sym-cosine", "asym-i2t-qnorm", "asym-i2t-cosine", "asym-t2i-qnorm")
    for name in named:
        (shop.folder / name).symlink_to(runs[name])  # their own names hold a digest of their settings, paths among them
    judged = ["--control", "asym-i2t-cosine", "--baseline", "sym-cosine"]
    shop.told("compared", shop.run("evaluate.py", "--compare", *named, *judged))


def others(shop: Shop) -> None:
    """What else there is to run: saved embeddings with evidence, advice for either kind of model, sentence pairs, and
    clip-benchmark's command line."""
    drawn(shop)
    data, _, model = small_scenes(shop.folder, shop.data)
    beir, encoder = make_beir(shop.folder / "beir", 300, 300), make_encoder(shop.folder / "encoder")
    run, cpu = shop.folder / "logs" / "run", ["--device", "cpu"]
    shop.run("train_clip.py", "--train-data", data, "--model", model, "--logs", run.parent, "--workers", 0, *cpu,
             "--lr", "2e-3", "--batch-size", 32, "--epochs", 4, "--loss", "asym-t2i", "--norm", "dot", "--no-report",
             "--val-data", "none", "--name", "run")  # fmt: skip
    saved = shop.folder / "embedded" / "saved.npz"
    saved.parent.mkdir()
    shop.run("embed.py", "--model", run, "--data", data, "--bank", data, "--bank-size", 50, "--workers", 0, *cpu,
             "--output", saved)  # fmt: skip
    shop.take("embedded", saved.parent)
    where = shop.folder / "of-saved"
    shop.run("evaluate.py", "--embeddings", saved, "--output", where, "--no-report")
    shop.take("of saved", where, re.compile("retrieval/.../(native|reversed|corrected)"))

    how = ["--steps", 20, "--seeds", 2, "--no-fisher", *cpu]
    shop.run("advise.py", "--model", encoder, "--data", beir, *how, "--output", shop.folder / "advice-text")
    shop.run("advise.py", "--model", run, "--data", data, *how, "--workers", 0, "--max-items", 150, "--output",
             shop.folder / "advice-clip")  # fmt: skip
    for kind in ("text", "clip"):
        shop.take(
            f"advice {kind}", shop.folder / f"advice-{kind}", re.compile("(?!sections/.2./norms/.*/(ci|by_)|trial/)")
        )

    rng = random.Random(5)
    rows = ["score\tsentence1\tsentence2"]
    for i in range(90):
        words, kept = rng.sample(WORDS, 6), i % 6
        rows.append(f"{kept}\t{' '.join(words[:5])}\t{' '.join(words[:kept] + rng.sample(WORDS, 5 - kept))}")
    pairs = shop.folder / "pairs.tsv"
    pairs.write_text("\n".join(rows) + "\n")
    where = shop.folder / "sts"
    shop.run("sts.py", "--model", encoder, "--train", pairs, "--holdout", 0.4, "--seeds", 0, 1, "--scale", "auto",
             "--lr", "1e-3", "--norms", "cosine", "qnorm", "learned", *cpu, "--output", where)  # fmt: skip
    shop.take("sts", where, re.compile("(?!runs/|.*/quantiles)"))

    where = shop.folder / "benchmark"
    for scoring in ("native", "cosine"):
        shop.run("clip_benchmark.py", "eval", "--model_type", "mmclip", "--model", run, "--scoring", scoring,
                 "--dataset", "wds/scenes", "--dataset_root", data, "--task", "zeroshot_retrieval", "--recall_k", 1, 5,
                 "--num_workers", 0, "--no_amp", "--output", where / scoring / "benchmark.json")  # fmt: skip
    shop.take("benchmark", where)


# --- sections of --full -----------------------------------------------------------------------------------------------


def demo(shop: Shop) -> None:
    """make demo, seed 0, with all of its steps; and its comparison."""
    drawn(shop)
    told = shop.run("demo.py", "--logs", shop.folder / "logs")
    runs = {name: shop.folder / "logs" / "demo-scenes-seed0" / name for name in ("baseline", "qnorm", "control")}
    for name, folder in runs.items():
        shop.take(name, folder, POOLS)
    judged = ["--control", runs["control"], "--baseline", runs["baseline"]]
    shop.told("compared", shop.run("evaluate.py", "--compare", *runs.values(), *judged))
    assert "side by side" in told
    where = shop.folder / "evaluated"
    shop.run("evaluate.py", "--model", runs["qnorm"], "--data", "builtin:scenes", "--bank", "builtin:scenes",
             "--zeroshot-data", "builtin:scenes-classes", "--device", "cpu", "--output", where, "--no-report",
             )  # fmt: skip
    shop.take("evaluated", where, POOLS)


def scenes_study(shop: Shop) -> None:
    """The real study of the built-in scenes."""
    drawn(shop)
    shop.run("run_study.py", "--config", "study_scenes", "--logs", shop.folder / "logs", "--jobs", shop.jobs)
    (folder,) = (p.parent for p in shop.folder.glob("logs/*/study.json"))
    shop.take("tables", folder)


def minilm(shop: Shop) -> None:
    """A known model on known collections: nDCG@10 .6492 on SciFact."""
    if shop.shared is None:
        print("  no real data: set MMCLIP_SHARED")
        return
    for name in ("scifact", "cranfield"):
        where = shop.folder / name
        shop.run("evaluate_text.py", "--model", shop.shared / "models" / "all-MiniLM-L6-v2", "--data",
                 shop.shared / "data" / name, "--device", "cpu", "--output", where)  # fmt: skip
        shop.take(name, where)


QUICK = (scenes, clip, text, embeddings, others, study)
FULL = (scenes, demo, scenes_study, minilm)


# --- comparing --------------------------------------------------------------------------------------------------------


def kind_of(file: str, key: str) -> tuple[str, bool]:
    """("rate", "loss" or "other", whether it is the interval of one)."""
    parts = key.split("/")
    interval = "ci" in parts or bool(re.search(r"(_lo|_hi|_low|_high)$", parts[-1]))
    if any(RATE.match(re.sub("^(val_)?([a-z0-9]{3}_)?", "", p)) for p in parts):
        return "rate", interval
    return "loss" if "loss" in key and file.endswith("metrics.jsonl") else "other", interval


def digits(file: str, key: str) -> int:
    kind, interval = kind_of(file, key)
    return DIGITS["loss" if kind == "other" and interval else kind]


def tolerance(file: str, key: str) -> tuple[float, float]:
    """(relative, absolute) of a float; a rate of other ranks is further off than 1e-9."""
    kind, interval = kind_of(file, key)
    if kind == "loss" or (kind == "other" and interval):
        return 1e-6, 1e-6 if kind == "loss" else 1e-9
    return (0.0, 1e-9) if kind == "rate" else (1e-5, 1e-9)


def differences(old: dict[str, Json], new: dict[str, Json], exact: bool = False) -> list[tuple[str, str, str]]:
    """(kind, file, what) of everything that is not the same: missing and new files and keys first."""
    found = [("missing", f, "the whole file") for f in old if f not in new]
    found += [("new", f, "the whole file") for f in new if f not in old]
    for file in (f for f in old if f in new):
        a, b = old[file], new[file]
        found += [("missing", file, k) for k in a if k not in b] + [("new", file, k) for k in b if k not in a]
        for key in (k for k in a if k in b):
            pairs = [("", a[key], b[key])]
            if isinstance(a[key], list) and isinstance(b[key], list):
                if len(a[key]) != len(b[key]):
                    found.append(("changed", file, f"{key}: {len(a[key])} entries, now {len(b[key])}"))
                pairs = [(f"[{i}]", x, y) for i, (x, y) in enumerate(zip(a[key], b[key], strict=False))]
            close = (0.0, 0.0) if exact else tolerance(file, key)
            apart = [(at, x, y) for at, x, y in pairs if not equal(x, y, *close)]
            found += [("changed", file, f"{key}{at}: {show(x, y)}") for at, x, y in apart[:3]]
            if len(apart) > 3:
                found.append(("changed", file, f"{key}: {len(apart) - 3} more of {len(pairs)}"))
    order = {"missing": 0, "new": 1, "changed": 2}
    return sorted(found, key=lambda d: order[d[0]])


def equal(x: Any, y: Any, relative: float, absolute: float) -> bool:
    if isinstance(x, bool) or isinstance(y, bool) or not (is_number(x) and is_number(y)):
        return type(x) is type(y) and x == y
    if isinstance(x, int) and isinstance(y, int):
        return x == y
    return x == y or math.isclose(x, y, rel_tol=relative, abs_tol=absolute)


def is_number(x: Any) -> bool:
    return isinstance(x, int | float)


def show(x: Any, y: Any) -> str:
    told = f"{x!r} -> {y!r}"
    return f"{told}  ({y - x:+.3g})" if is_number(x) and is_number(y) else told


def report(found: Sequence[tuple[str, str, str]], most: int) -> None:
    """By kind, then by file; a file's first lines only."""
    for kind in ("missing", "new", "changed"):
        of_kind = [d for d in found if d[0] == kind]
        files = dict.fromkeys(f for _, f, _ in of_kind)
        if of_kind:
            print(f"\n{kind.upper()}: {len(of_kind)} in {len(files)} files")
        for file in files:
            lines = [what for _, f, what in of_kind if f == file]
            print(f"  {file}")
            for line in lines[:most]:
                print(f"    {line}")
            if len(lines) > most:
                print(f"    and {len(lines) - most} more")


# --- the file: a list of keys, which files may share, and their values ------------------------------------------------


def save(path: Path, about: Json, facts: dict[str, Json]) -> None:
    """Of a key only what is new after the one before it: "2/ndcg@10" begins with the first two parts of that."""
    shapes: dict[tuple[str, ...], str] = {}
    files = {}
    for name, content in facts.items():
        shape = shapes.setdefault(tuple(content), f"k{len(shapes)}")
        files[name] = [shape, *content.values()]
    heads: dict[str, list[str]] = {}
    for names, shape in shapes.items():
        before: list[str] = []
        heads[shape] = []
        for parts in (name.split("/") for name in names):
            n = next((i for i, part in enumerate(parts[:-1]) if before[i : i + 1] != [part]), len(parts) - 1)
            heads[shape].append("/".join([str(n), *parts[n:]]))
            before = parts
    told = [",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'), ensure_ascii=False)}"
                       for k, v in part.items()) for part in (heads, files)]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"about":{json.dumps(about)},\n"keys":{{\n{told[0]}}},\n"files":{{\n{told[1]}}}}}\n', "utf-8")


def load(path: Path) -> tuple[Json, dict[str, Json]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    shapes: dict[str, list[str]] = {}
    for shape, heads in content["keys"].items():
        before: list[str] = []
        shapes[shape] = []
        for head in heads:
            n, *new = head.split("/")
            before = before[: int(n)] + new
            shapes[shape].append("/".join(before))
    files = {n: dict(zip(shapes[k], values, strict=True)) for n, (k, *values) in content["files"].items()}
    return content["about"], files


def about_here() -> Json:
    """What may explain other last digits; nothing of it is compared."""
    from importlib.metadata import PackageNotFoundError, version

    found: Json = {"python": sys.version.split()[0]}
    for name in ("torch", "numpy", "open_clip_torch", "transformers", "sentence-transformers", "pillow", "scipy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    cpu = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", cpu.read_text()) if cpu.is_file() else []
    return found | {"cpu": names[0] if names else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("freeze", "compare"))
    parser.add_argument("--quick", action="store_true", help="the default")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="compare these sections only")
    parser.add_argument(
        "--golden", "--out", type=Path, metavar="FILE", help="[tests/golden/golden_quick.json or golden_full.json]"
    )
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout whose scripts are run [this one]")
    parser.add_argument("--work", type=Path, help="where they run [logs/golden/quick or full]")
    parser.add_argument("--cold", action="store_true", help="start every script in a new Python; --full always does")
    parser.add_argument("--jobs", type=int, default=2, help="runs of a study at once, each on one thread")
    parser.add_argument("--most", type=int, default=12, help="differences that are printed of a file")
    asked = parser.parse_args()
    if any(os.environ.get(k) != v for k, v in THREADS.items()):  # numpy and torch read them when they are imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **THREADS})
    level, sections = ("full", FULL) if asked.full else ("quick", QUICK)
    golden = asked.golden or HERE / "golden" / f"golden_{level}.json"
    if wrong := set(asked.only or []) - {s.__name__ for s in sections}:
        parser.error(f"no section {', '.join(sorted(wrong))}; there are {', '.join(s.__name__ for s in sections)}")
    if asked.only and asked.what == "freeze":
        parser.error("--only is for compare: a file is frozen whole")
    chosen = [s for s in sections if not asked.only or s.__name__ in asked.only]
    work = (asked.work or HERE.parent / "logs" / "golden" / level).resolve()
    data = work / "data" if asked.full else HERE.parent / "data"
    shared = Path(os.environ.get("MMCLIP_SHARED", HERE.parent.parent / "shared")).resolve()
    warm = not (asked.cold or asked.full)
    shop = Shop(asked.root.resolve(), work, data, shared if (shared / "data").is_dir() else None, asked.jobs, warm)
    if warm:
        for name in PRELOADED:
            importlib.import_module(name)
        assert "mmclip" not in sys.modules
    if asked.full and "scenes" in {s.__name__ for s in chosen}:
        shutil.rmtree(data, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    shop.require_own_package()
    began = time.monotonic()
    for section in chosen:
        shop.section = section.__name__
        shutil.rmtree(shop.folder, ignore_errors=True)
        shop.folder.mkdir(parents=True)
        since = time.monotonic()
        print(f"{section.__name__}:", flush=True)
        section(shop)
        print(f"  {time.monotonic() - since:5.0f} s in all", flush=True)
    print(f"{time.monotonic() - began:.0f} s; {sum(map(len, shop.facts.values()))} keys of {len(shop.facts)} files")
    facts = json.loads(json.dumps(shop.facts))
    if asked.what == "freeze":
        save(golden, about_here(), facts)
        print(f"{golden}: {golden.stat().st_size / 1000:.0f} kB")
        return
    about, before = load(golden)
    names = [s.__name__ for s in chosen if s is not minilm or shop.shared]
    found = differences({k: v for k, v in before.items() if k.split("/")[0] in names}, facts)
    if not found:
        print(f"equal to {golden.name}")
        return
    report(found, asked.most)
    here = about_here()
    if other := [f"{k} {about.get(k)}, here {v}" for k, v in here.items() if about.get(k) != v]:
        print(f"\nfrozen with {'; '.join(other)}")
    sys.exit(1)


if __name__ == "__main__":
    main()
