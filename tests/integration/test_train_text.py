"""scripts/train_text.py as a user starts it: killed and continued, stopped, on two ranks, with angles that collapse."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmclip.training.checkpoint import load_checkpoint
from tests.helpers.texts import WORDS, make_beir, make_bert, write_jsonl, write_qrels
from tests.helpers.tiny import ROOT, run_script

SCRIPT = ROOT / "scripts" / "train_text.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_beir(tmp_path_factory.mktemp("data") / "beir", queries=60, documents=100)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With dropout: a continuation must draw what the run would have drawn."""
    folder = make_bert(tmp_path_factory.mktemp("model"))
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    path.write_text(json.dumps(config))
    return folder


def flags(beir: Path, bert: Path, logs: Path, **changed: Any) -> list[str]:
    known: dict[str, Any] = {
        "model": bert, "train-data": beir, "logs": logs, "batch-size": 8, "watch-queries": 5, "lr": 1e-3,
        "device": "cpu", "norm": "learned", "learn-scale": None, "no-measure-start": None,
    }  # fmt: skip
    found = []
    for name, value in (known | {k.replace("_", "-"): v for k, v in changed.items()}).items():
        found += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return found


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without how fast it went."""
    found = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("pairs_per_second", "data_wait")} for line in found]


def signalled(arguments: list[str], run: Path, step: int, signum: int) -> tuple[int, str]:
    """Start the script, send it a signal once ``step`` lines are there; its exit code and what it said."""
    process = subprocess.Popen([sys.executable, str(SCRIPT), *arguments], cwd=ROOT, env=ENVIRONMENT, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    path = run / "metrics.jsonl"
    while process.poll() is None:
        if path.is_file() and path.read_text().count('"loss"') >= step:
            process.send_signal(signum)
            break
        time.sleep(0.002)
    said = process.communicate(timeout=200)[1]
    return process.returncode, said


def test_a_run_that_is_killed_and_stopped_ends_as_one_that_was_not(beir: Path, bert: Path, tmp_path: Path) -> None:
    common = flags(beir, bert, tmp_path, epochs=20, save_steps=3, watch_steps=5)
    whole = run_script("train_text.py", *common, "--name", "whole")
    assert whole.returncode == 0, whole.stderr[-2000:]
    cut, run = [*common, "--name", "cut"], tmp_path / "cut"
    assert signalled(cut, run, 8, signal.SIGKILL)[0] == -signal.SIGKILL
    half = run / "checkpoints" / ".step_00007777.pt.1.partial"  # as a killed write leaves it
    half.write_bytes(b"half")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7')
    code, said = signalled([*cut, "--resume", "latest"], run, 40, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, said[-2000:]
    assert "continuing after step " in said and "stopped by SIGTERM after step " in said
    assert not half.exists()
    stopped = int(said.rsplit("after step ", 1)[1].split()[0])
    kept = sorted(int(p.stem[5:]) for p in (run / "checkpoints").glob("*.pt"))
    assert kept[-1] == stopped and len(kept) == 2, "what was trained is saved, and no more than two are kept"
    rest = run_script("train_text.py", *cut, "--resume", "latest")
    assert rest.returncode == 0, rest.stderr[-2000:]
    assert lines(run) == lines(tmp_path / "whole")
    for file in ("model.safetensors", "mmclip.json"):
        assert (run / "model" / file).read_bytes() == (tmp_path / "whole" / "model" / file).read_bytes(), file
    ours, theirs = (load_checkpoint(f / "checkpoints" / "step_00000080.pt") for f in (run, tmp_path / "whole"))
    for part in ("encoder", "loss"):
        assert all(torch.equal(v, theirs[part][k]) or v.isnan().all() for k, v in ours[part].items()), part
    assert [x["step"] for x in lines(run) if "val_q2d_ndcg@10_native" in x] == list(range(5, 81, 5))


def test_two_ranks_compute_the_loss_of_one_process_with_their_batches(beir: Path, bert: Path, tmp_path: Path) -> None:
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):  # ranks draw masks of their own
        config = json.loads((bert / "config.json").read_text()) | {name: 0.0}
        (bert / "config.json").write_text(json.dumps(config))
    how = {"max_steps": 3, "warmup": 0}
    one = run_script("train_text.py", *flags(beir, bert, tmp_path, **how), "--name", "one")
    assert one.returncode == 0, one.stderr[-2000:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), "--"]
    two = subprocess.run(
        [*start, str(SCRIPT), *flags(beir, bert, tmp_path, **how | {"batch_size": 4}), "--name", "two"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert two.returncode == 0, two.stderr[-3000:]
    assert "FutureWarning" not in two.stderr
    a, b = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert a[0]["loss"] == pytest.approx(b[0]["loss"], rel=1e-6)
    for x, y in zip(a[:3], b[:3], strict=True):  # so the gradients were those of the joint batch
        for name in ("loss", "gamma_q", "gamma_d", "logit_scale_q2d", "norm_query_mean"):
            assert x[name] == pytest.approx(y[name], rel=2e-4), (x["step"], name)


def test_angles_that_collapse_are_told_and_end_a_strict_run(tmp_path: Path) -> None:
    """Lengths are made to carry everything: the documents that all queries want are the longest by far, and point
    further from the queries than all others do."""
    data, model = _all_queries_want_the_same(tmp_path / "data"), _length_is_all(tmp_path / "model")
    common = flags(data, model, tmp_path, norm="dot", lr=1e-9, epochs=1, watch_queries=12, watch_steps=1, max_steps=3)
    told = run_script("train_text.py", *common, "--name", "told")
    assert told.returncode == 0, told.stderr[-2000:]
    watched = lines(tmp_path / "told")
    assert [len(x.get("alarms", {})) for x in watched] == [1, 0, 0], "once"
    assert watched[0]["val_q2d_ndcg@10_native"] > 0.9 and watched[0]["val_q2d_ndcg@10_cosine"] < 0.1
    assert told.stderr.count("the ranking rests on the magnitudes") == 1
    strict = run_script("train_text.py", *common, "--name", "strict", "--strict")
    last = strict.stderr.strip().splitlines()[-1]
    assert strict.returncode == 2 and "Traceback" not in strict.stderr
    assert last.startswith("error: step 1: alarm (--strict): q2d finds ") and "by cosine (ndcg@10)" in last
    assert (tmp_path / "strict" / "checkpoints" / "step_00000001.pt").is_file(), "nothing is lost"


def test_help_waits_for_no_model() -> None:
    code = (
        "import sys\nfrom mmclip.cli import main\n"
        "try:\n    main(['train-text', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'help imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--keep-normalize" in done.stdout and "Examples:" in done.stdout


def _all_queries_want_the_same(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    good = [f"{WORDS[0]} {WORDS[0]} {WORDS[0]} {WORDS[i]}" for i in range(1, 9)]
    bad = [" ".join(rng.choice(WORDS[20:], 4)) for _ in range(60)]
    write_jsonl(folder / "corpus.jsonl", ({"_id": f"d{i}", "text": text} for i, text in enumerate(good + bad)))
    queries = [" ".join(rng.choice(WORDS[20:], 3)) for _ in range(30)]
    write_jsonl(folder / "queries.jsonl", ({"_id": f"q{i}", "text": text} for i, text in enumerate(queries)))
    write_qrels(folder / "qrels" / "train.tsv", ((f"q{i}", f"d{j}", 1) for i in range(30) for j in range(len(good))))
    return folder


def _length_is_all(folder: Path) -> Path:
    """A BERT with one linear map behind it, by which texts of the first word get (3, 2) and all others (1, 0)."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense

    bert = SentenceTransformer(str(make_bert(folder, normalize=False)), device="cpu")
    rng = np.random.default_rng(1)
    good = [f"{WORDS[0]} {WORDS[0]} {WORDS[0]} {WORDS[i]}" for i in range(1, 9)]
    bad = [" ".join(rng.choice(WORDS[20:], n)) for n in (3, 4) for _ in range(200)]
    rows = bert.encode(good * 20 + bad, convert_to_tensor=True, show_progress_bar=False)
    wanted = torch.tensor([[3.0, 2.0]] * (20 * len(good)) + [[1.0, 0.0]] * len(bad))
    found = torch.linalg.lstsq(torch.cat([rows, torch.ones(len(rows), 1)], dim=1), wanted).solution
    dense = Dense(rows.shape[1], 2, activation_function=torch.nn.Identity())
    with torch.no_grad():
        dense.linear.weight.copy_(found[:-1].T)
        dense.linear.bias.copy_(found[-1])
    model = SentenceTransformer(modules=[*bert, dense], device="cpu")
    model.save_pretrained(str(folder / "length"), create_model_card=False)
    return folder / "length"
