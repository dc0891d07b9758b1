"""Text runs: refusals before a model loads, files, kills and continuations, two ranks, angles that collapse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mmclip.commands.train import run as train_text
from mmclip.config import TextTrainConfig
from mmclip.errors import UserError
from mmclip.models.text_encoder import load_text_model
from mmclip.roles import Direction
from mmclip.training.checkpoint import load_checkpoint
from mmclip.training.text_task import TextTask, build_loss
from tests.helpers.texts import WORDS, make_beir, make_bert, write_jsonl, write_qrels
from tests.helpers.tiny import ROOT, disturbed, logged, run_script, untimed

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


def test_a_run_that_is_killed_and_stopped_ends_as_one_that_was_not(beir: Path, bert: Path, tmp_path: Path) -> None:
    common = flags(beir, bert, tmp_path, epochs=20, save_steps=3, watch_steps=5)
    whole = run_script("train_text.py", *common, "--name", "whole")
    assert whole.returncode == 0, whole.stderr[-2000:]
    cut, run = ["train_text.py", *common, "--name", "cut"], tmp_path / "cut"
    assert disturbed(cut, run, 8, lambda pid: os.kill(pid, signal.SIGKILL))[0] == -signal.SIGKILL
    half = run / "checkpoints" / ".step_00007777.pt.1.partial"  # as a killed write leaves it
    half.write_bytes(b"half")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7')
    code, said = disturbed([*cut, "--resume", "latest"], run, 40, lambda pid: os.kill(pid, signal.SIGTERM))
    assert code == 128 + signal.SIGTERM, said[-2000:]
    assert "continuing after step " in said and "stopped by SIGTERM after step " in said
    assert not half.exists()
    stopped = int(said.rsplit("after step ", 1)[1].split()[0])
    kept = sorted(int(p.stem[5:]) for p in (run / "checkpoints").glob("*.pt"))
    assert kept[-1] == stopped and len(kept) == 2, "what was trained is saved, and no more than two are kept"
    rest = run_script(*cut, "--resume", "latest")
    assert rest.returncode == 0, rest.stderr[-2000:]
    assert untimed(run) == untimed(tmp_path / "whole")
    for file in ("model.safetensors", "mmclip.json"):
        assert (run / "model" / file).read_bytes() == (tmp_path / "whole" / "model" / file).read_bytes(), file
    ours, theirs = (load_checkpoint(f / "checkpoints" / "step_00000080.pt") for f in (run, tmp_path / "whole"))
    for part in ("encoder", "loss"):
        assert all(torch.equal(v, theirs[part][k]) or v.isnan().all() for k, v in ours[part].items()), part
    assert [x["step"] for x in untimed(run) if "val_q2d_ndcg@10_native" in x] == list(range(5, 81, 5))


def test_two_ranks_compute_the_loss_of_one_process_with_their_batches(beir: Path, bert: Path, tmp_path: Path) -> None:
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):  # ranks draw masks of their own
        config = json.loads((bert / "config.json").read_text()) | {name: 0.0}
        (bert / "config.json").write_text(json.dumps(config))
    how = {"max_steps": 3, "warmup": 0}
    one = run_script("train_text.py", *flags(beir, bert, tmp_path, **how), "--name", "one")
    assert one.returncode == 0, one.stderr[-2000:]
    two = run_script("train_text.py", *flags(beir, bert, tmp_path, **how, batch_size=4), "--name", "two", ranks=2)
    assert two.returncode == 0, two.stderr[-3000:]
    assert "FutureWarning" not in two.stderr
    a, b = untimed(tmp_path / "one"), untimed(tmp_path / "two")
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
    watched = untimed(tmp_path / "told")
    assert [len(x.get("alarms", {})) for x in watched] == [1, 0, 0], "once"
    assert watched[0]["val_q2d_ndcg@10_native"] > 0.9 and watched[0]["val_q2d_ndcg@10_cosine"] < 0.1
    assert told.stderr.count("the ranking rests on the magnitudes") == 1
    strict = run_script("train_text.py", *common, "--name", "strict", "--strict")
    last = strict.stderr.strip().splitlines()[-1]
    assert strict.returncode == 2 and "Traceback" not in strict.stderr
    assert last.startswith("error: step 1: alarm (--strict): q2d finds ") and "by cosine (ndcg@10)" in last
    assert (tmp_path / "strict" / "checkpoints" / "step_00000001.pt").is_file(), "nothing is lost"


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


# --- in this process ---

Make = Callable[..., TextTrainConfig]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_beir(tmp_path_factory.mktemp("data") / "beir", queries=40, documents=80)
    (folder / "qrels" / "void.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t0\n", encoding="utf-8")
    return folder


@pytest.fixture
def make(small: Path, bert: Path, tmp_path: Path) -> Make:
    def settings(**changed: Any) -> TextTrainConfig:
        known: dict[str, Any] = {
            "model": str(bert), "train_data": str(small), "val_data": [str(small)], "logs": str(tmp_path), "name": "x",
            "batch_size": 4, "epochs": 2, "watch_queries": 5, "lr": 1e-3, "device": "cpu", "measure_start": False,
        }  # fmt: skip
        return TextTrainConfig(**known | changed)

    return settings


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"batch_size": 64}, "--batch-size 64: there are only 20 training pairs in"),
        ({"batch_size": 22, "train_fraction": 0.5}, "--batch-size 22: there are only"),
        ({"val_data": ["BEIR:dev"]}, "no split 'dev'; splits in qrels/: test, train, void"),
        ({"val_data": ["BEIR:train", "BEIR:test", "BEIR"]}, "--val-data: beir-test is named twice"),
        ({"val_data": ["/nowhere"]}, "/nowhere: no such folder; a BEIR folder has"),
        ({"train_split": "dev"}, "no split 'dev'"),
        ({"watch_queries": 15}, "--watch-queries 15"),
        ({"resume": "latest"}, "holds no run; check --logs and --name"),
        ({"val_data": ["BEIR:void"]}, "no query with a relevant document"),
    ],
)
def test_faults_of_data_are_named_before_a_model_loads(
    make: Make, small: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(TextTask, "load_model", lambda *_: pytest.fail("a model was loaded"))
    if "val_data" in changed:
        changed = {"val_data": [text.replace("BEIR", str(small)) for text in changed["val_data"]]}
    with pytest.raises(UserError) as error:
        train_text(make(**changed))
    assert told in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_a_continuation_names_each_setting_that_is_another(make: Make) -> None:
    train_text(make(max_steps=1, val_data=None))
    train_text(make(max_steps=1, resume="latest", save_steps=1, strict=True, val_data=None))
    with pytest.raises(UserError, match=r"norm was cosine, is dot, lr was 0\.001, is 0\.002$"):
        train_text(make(max_steps=1, resume="latest", lr=0.002, norm="dot"))


def test_the_loss_is_the_one_of_the_flags(make: Make) -> None:
    config = make(loss="both", q2d_weight=0.75, norm="learned", gamma_init=0.3, mini_batch_size=2)
    data, loss = TextTask.open_data(config), build_loss(config)
    assert loss.weights == {Direction.Q2D: 0.75, Direction.D2Q: 0.25}
    trained = [n for n, p in loss.named_parameters() if p.requires_grad]
    assert trained == ["similarity.gamma_hat_q", "similarity.gamma_hat_d"], "alpha is held"
    assert data.held_out is not None and len(data.held_out.queries) == 5
    assert not set(data.held_out.queries) & set(data.pairs.queries), "what is watched is not trained on"


def test_gamma_moves_at_its_own_rate_alpha_not_at_all_and_a_finished_run_is_left_alone(
    make: Make, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make(norm="learned", gamma_lr=0.1, lr=1e-6, warmup=0, max_steps=4, measure_start=True,
                    val_data=[str(small), f"{small}:train"])  # fmt: skip
    folder = train_text(settings)
    lines = logged(folder)
    steps = [x for x in lines if "loss" in x]
    assert [x["step"] for x in steps] == [1, 2, 3, 4] and {x["epoch"] for x in steps} == {0}
    assert len({x["logit_scale_q2d"] for x in steps}) == 1
    assert 0.02 < abs(steps[0]["gamma_d"] - 0.5) < 0.03, "Adam's first step: 0.1 of gamma_hat, a quarter of it in gamma"
    assert steps[0]["effective_scale_q2d"] == pytest.approx(20, rel=1e-4)
    for name in ("loss_q2d", "norm_query_mean", "norm_document_mean", "lr", "pairs_per_second"):
        assert all(x[name] > 0 for x in steps), name
    watched = [x for x in lines if "val_q2d_ndcg@10_cosine" in x]
    assert [x["step"] for x in watched] == [4] and 0 <= watched[0]["val_q2d_ndcg@10_cosine"] <= 1
    facts = json.loads((folder / "model" / "mmclip.json").read_text())
    assert facts["removed"] == ["Normalize"] and facts["steps"] == 4 and facts["model"] == settings.model
    assert facts["gamma_d"] == steps[-1]["gamma_d"] and f"{facts['gamma_d']:.4g}" in facts["scoring"]
    results, start = (json.loads((folder / f"{n}.json").read_text()) for n in ("results", "start"))
    assert results["trained_with"]["gamma_d"] == facts["gamma_d"] and results["seconds"] > 0
    assert (results["steps"], results["seed"], start["steps"]) == (4, 0, 0)
    assert start["trained_with"]["gamma_d"] == 0.5 and start["fisher"]["q2d"]["status"] == "undetermined"
    other = json.loads((folder / "evaluations" / "beir-train" / "results.json").read_text())
    assert other["data"]["split"] == "train" and results["data"]["split"] == "test"
    assert yaml.safe_load((folder / "config.yaml").read_text()) == settings.to_dict() | {"resume": None}
    saved = load_text_model(str(folder))
    assert saved.removed == [] and saved.metadata["gamma_q"] == facts["gamma_q"]
    stamp = (folder / "results.json").stat().st_mtime_ns
    capsys.readouterr()
    train_text(make(**settings.to_dict() | {"resume": "latest"}))
    assert "this run is finished" in capsys.readouterr().err
    assert (folder / "results.json").stat().st_mtime_ns == stamp


def test_normalize_stays_where_it_is_asked_for(make: Make) -> None:
    folder = train_text(make(keep_normalize=True, max_steps=1, val_data=None, watch_queries=0))
    facts = json.loads((folder / "model" / "mmclip.json").read_text())
    assert facts["removed"] == [] and facts["scoring"] == "rank documents by cosine"
    assert torch.allclose(load_text_model(str(folder), keep_normalize=True).encode(["bal"], "query").norm(),
                          torch.ones(()))  # fmt: skip
    assert not (folder / "results.json").exists()
    with pytest.raises(UserError, match="--keep-normalize with --norm dot"):
        make(keep_normalize=True, norm="dot")


def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(make: Make) -> None:
    broken = make(norm="dot", lr=1e30, warmup=0, epochs=8, val_data=None, watch_queries=0, grad_clip_norm=0)
    with pytest.raises(
        UserError, match=r"^step \d+: the loss is (nan|inf), and \d+ gradients are not finite; samples: "
    ):
        train_text(broken)


def test_weights_that_are_not_finite_are_no_result(make: Make) -> None:
    with pytest.raises(UserError, match=r"^step 1: \d+ weights are not finite, such as .*; no checkpoint is made"):
        train_text(make(norm="dot", lr=1e38, warmup=0, max_steps=1, val_data=None, watch_queries=0))
    assert not list(Path(make().logs).glob("*/model")) and not list(Path(make().logs).glob("*/checkpoints/step*"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "not a checkpoint that can be read safely"),
        (lambda path: path.write_bytes(b"\x80\x02"), "not a checkpoint that can be read safely"),
        (lambda path: torch.save(load_checkpoint(path) | {"ranks": 2}, path), "the run had 2 processes, now there"),
        (lambda path: torch.save(load_checkpoint(path) | {"step": 99}, path), "step 99 of a run of 2"),
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_one_line(
    make: Make, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any], told: str
) -> None:
    config = make(max_steps=2, val_data=None, watch_queries=0)
    with monkeypatch.context() as patched:
        patched.setattr("mmclip.commands.train._finish", lambda *_: None)  # killed before the model was saved
        folder = train_text(config)
    change(folder / "checkpoints" / "step_00000002.pt")
    with pytest.raises(UserError, match=told):
        train_text(make(**config.to_dict() | {"resume": "latest"}))
