"""Training on pairs: the loss against sentence-transformers' own, the split, restarting, and a run's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmclip.commands.sts import run as run_sts
from mmclip.config import StsConfig, parse
from mmclip.config.text import PAPER_SCALE
from mmclip.errors import UserError
from mmclip.models.text_encoder import TextEncoder, load_text_model
from mmclip.roles import Direction, Normalization
from mmclip.tasks import sts as task
from mmclip.tasks.sts import ResidualHead, RoleMSELoss, open_sts, split_pairs, train_pairs
from tests.helpers.texts import WORDS, make_bert
from tests.helpers.tiny import run_script


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def model(bert: Path) -> TextEncoder:
    return load_text_model(str(bert))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pairs, whose score is the share of words in common; some sentences stand in several pairs."""
    rng = np.random.default_rng(0)
    rows = ["score\tsentence1\tsentence2"]
    for i in range(60):
        a = rng.choice(WORDS[:30], 5, replace=False)
        b = np.concatenate([a[: i % 6], rng.choice(WORDS[:30], 5 - i % 6, replace=False)])
        first = " ".join(WORDS[:3]) if i % 10 == 0 else " ".join(a)
        rows.append(f"{float(i % 6)}\t{first}\t{' '.join(b)}")
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def settings(model: Path, file: Path, output: Path, **others: Any) -> StsConfig:
    about = {"holdout": 0.3, "epochs": 1, "batch_size": 16, "lr": 1e-3, "device": "cpu"} | others
    return StsConfig(model=str(model), train=str(file), output=str(output), **about)


def test_cosine_is_sentence_transformers_cosine_similarity_loss(model: TextEncoder, file: Path) -> None:
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    pairs = open_sts(file)
    labels = torch.tensor(pairs.scores / 5, dtype=torch.float32)
    values, gradients = [], []
    for loss in (RoleMSELoss(model.encoder, "cosine"), CosineSimilarityLoss(model.encoder)):
        model.encoder.zero_grad()
        values.append(loss([dict(model.encoder.preprocess(side)) for side in (pairs.first, pairs.second)], labels))
        values[-1].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.encoder.parameters() if p.grad is not None]))
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", list(Normalization))
@pytest.mark.parametrize("scale", [None, 0.3, "auto"])
def test_value_is_the_papers_form(model: TextEncoder, norm: Normalization, scale: float | str | None) -> None:
    torch.manual_seed(0)
    q, d, y = 3 * torch.randn(9, 4), 2 * torch.randn(9, 4), torch.rand(9)
    loss = RoleMSELoss(model.encoder, norm, scale, effective_scale=0.5 if scale == "auto" else 1.0)
    gq, gd = (float(torch.as_tensor(g).detach()) for g in loss.similarity.exponents)
    nq, nd = q.norm(dim=1), d.norm(dim=1)
    alpha = {None: 1.0 if norm == "cosine" else PAPER_SCALE, 0.3: 0.3,
             "auto": 0.5 / float((nq ** (1 - gq)).mean() * (nd ** (1 - gd)).mean())}[scale]  # fmt: skip
    naive = ((alpha * (q * d).sum(1) / (nq**gq * nd**gd) - y) ** 2).mean()
    torch.testing.assert_close(loss.of_vectors(q, d, y), naive)
    loss.of_vectors(10 * q, d, y)  # a later batch does not calibrate again
    assert loss.alpha == pytest.approx(alpha, rel=1e-5)
    trained = {n for n, p in loss.similarity.named_parameters() if p.requires_grad}
    assert trained == ({"gamma_hat_q", "gamma_hat_d"} if norm == "learned" else set())


def test_loss_refuses_unit_vectors_and_scales_that_are_none(bert: Path, model: TextEncoder) -> None:
    whole = load_text_model(str(bert), keep_normalize=True)
    assert model.removed == ["Normalize"]
    assert RoleMSELoss(whole.encoder, "cosine").alpha == 1
    with pytest.raises(ValueError, match="needs raw vectors"):
        RoleMSELoss(whole.encoder, "qnorm")
    for scale in (0.0, -1.0, float("nan"), float("inf"), "big"):
        with pytest.raises(ValueError, match="neither a number above 0"):
            RoleMSELoss(model.encoder, "dot", scale)


def test_it_trains_in_sentence_transformers_trainer(model: TextEncoder, file: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    pairs = open_sts(file)
    columns = {"sentence1": pairs.first, "sentence2": pairs.second, "score": (pairs.scores / 5).tolist()}
    loss = RoleMSELoss(model.encoder, "learned", "auto")
    trained = [loss.similarity.gamma_hat_q, next(model.encoder.parameters())]
    before = [p.detach().clone() for p in trained]
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, learning_rate=1e-2, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    SentenceTransformerTrainer(model.encoder, arguments, train_dataset=Dataset.from_dict(columns), loss=loss).train()
    assert all(not torch.equal(a.cpu(), b) for a, b in zip(trained, before, strict=True))
    assert loss.similarity.has_norm_stats(Direction.Q2D)


def test_no_sentence_stands_on_both_sides_of_a_split(file: Path) -> None:
    pairs = open_sts(file)
    for seed in range(5):
        train, held = split_pairs(pairs, 0.3, seed)
        assert not train.sentences & held.sentences
        assert len(train) + len(held) == 60
        assert 18 <= len(held) <= 18 + np.bincount(pairs.groups).max()
        assert split_pairs(pairs, 0.3, seed)[1].fingerprint() == held.fingerprint()
    assert len({split_pairs(pairs, 0.3, s)[1].fingerprint() for s in range(5)}) > 1
    for share in (0.001, 0.999):
        with pytest.raises(UserError, match="at least 3 are needed"):
            split_pairs(pairs, share, 0)
    kept = task.without_sentences_of(pairs, held)
    assert kept.fingerprint() == train.fingerprint()
    assert kept.notes[0].startswith(f"{len(held)} training pairs left out")


@pytest.mark.parametrize("head", [False, True])
def test_training_lowers_the_loss_and_follows_from_the_seed(bert: Path, file: Path, tmp_path: Path, head: bool) -> None:
    pairs = open_sts(file)
    about = settings(bert, file, tmp_path, epochs=3, scale=1.0, lr=1e-2, head_only=head)
    histories = []
    for seed in (1, 2, 1):
        model = load_text_model(str(bert))
        start = {k: v.clone() for k, v in model.encoder.state_dict().items()}
        vectors = model.encode(pairs.first, "query").double(), model.encode(pairs.second, "document").double()
        loss, layer, history = train_pairs(model, "qnorm", pairs, about, seed, vectors if head else None)
        histories.append(history)
        moved = any(not torch.equal(v, start[k]) for k, v in model.encoder.state_dict().items())
        assert moved != head == (layer is not None)
        assert loss.alpha == pytest.approx(1)
    assert histories[0] == histories[2] != histories[1]
    assert np.mean(histories[0][-4:]) < 0.8 * np.mean(histories[0][:2])
    x = torch.randn(3, 8, dtype=torch.float64)  # a head changes nothing at first
    torch.testing.assert_close(ResidualHead(8).transform((x, 2 * x)), (x, 2 * x), atol=1e-6, rtol=1e-6)


def test_training_cuts_each_side_to_its_own_length(model: TextEncoder, file: Path) -> None:
    """A short query once cut the documents, too."""
    model.lengths["query"] = 4
    query, document = task._inputs(model, open_sts(file), [1, 2])
    assert (query["input_ids"].shape, document["input_ids"].shape) == ((2, 4), (2, 7))


def test_a_repeated_command_trains_nothing_again_and_a_damaged_run_is(
    bert: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = settings(bert, file, tmp_path, norms=["cosine", "qnorm"], seeds=[0, 1], head_only=True)
    first = run_sts(about)
    files = sorted((tmp_path / "runs").glob("*.json"))
    assert [f.name.rsplit("-", 1)[0] for f in files] == ["cosine-seed0", "cosine-seed1", "qnorm-seed0", "qnorm-seed1"]
    written = [f.stat().st_mtime_ns for f in files]
    assert run_sts(about) == first == json.loads((tmp_path / "sts.json").read_text(encoding="utf-8"))
    assert [f.stat().st_mtime_ns for f in files] == written
    files[0].write_text("{", encoding="utf-8")
    assert run_sts(about)["norms"] == first["norms"]
    assert [f.stat().st_mtime_ns == w for f, w in zip(files, written, strict=True)] == [False, True, True, True]
    run_sts(settings(bert, file, tmp_path, norms=["qnorm"], seeds=[0], scale="auto"))
    assert len(list((tmp_path / "runs").glob("*.json"))) == 5  # another setting is another run
    assert "less" in capsys.readouterr().out


def test_the_report(bert: Path, file: Path, tmp_path: Path) -> None:
    norms = ["cosine", "dot", "qnorm", "learned"]
    report = run_sts(settings(bert, file, tmp_path, norms=norms, seeds=[0, 1], scale="auto", head_only=True))
    assert report["removed"] == ["Normalize"]
    assert report["train"]["label"] == "score / 5"
    assert report["data"]["holdout"] == 0.3
    assert report["data"]["n_pairs"] + report["train"]["n_pairs"] == 60
    for run in report["runs"]:
        assert run["effective_scale"]["start"] == pytest.approx(1, rel=0.2)  # the first batch's norms, not these
        scorings = run["evaluation"]["scorings"]
        assert run["norm"] == "learned" or scorings["native"]["spearman"] == scorings[run["norm"]]["spearman"]
    for norm, found in report["norms"].items():
        assert set(found["native"]["seeds"]) == {"0", "1"}
        assert found["native"]["spearman"] == pytest.approx(np.mean(list(found["native"]["seeds"].values())))
        minus = found["native"]["minus"]
        others = {"native of cosine", "native of dot"} - {f"native of {norm}"}
        assert set(minus) == others | ({"untrained"} if norm != "learned" else set())
        assert all(other["ci"][0] <= other["delta"] <= other["ci"][1] for other in minus.values())
    lines = (tmp_path / "sts.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 5 * (1 + 8 + 4)
    assert lines[1].startswith("auto 1,untrained,,cosine,")


def test_the_script_scores_a_file_and_refuses_in_one_line(bert: Path, file: Path, tmp_path: Path) -> None:
    report = run_sts(StsConfig(model=str(bert), data=str(file), output=str(tmp_path / "out"), device="cpu"))
    assert report["untrained"]["scorings"].keys() == {"cosine", "dot", "qnorm", "dnorm", "native"}
    assert "norms" not in report
    bad = tmp_path / "bad.tsv"
    bad.write_text("score\tsentence1\tsentence2\n1\ta\tb\nx\ta\tb\n", encoding="utf-8")
    done = run_script("sts.py", "--model", bert, "--data", bad, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {bad}: line 3: the score is a number, got 'x'"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing"),
        (["--model", "m"], "--data is missing"),
        (["--model", "m", "--holdout", "0.3"], "needs --train"),
        (["--model", "m", "--train", "F"], "either --data FILE, or --holdout"),
        (["--model", "m", "--train", "F", "--data", "F", "--holdout", "0.3"], "either --data FILE, or --holdout"),
        (["--model", "m", "--data", "F", "--scale", "high"], "--scale high: expected a number above 0, or auto"),
        (["--model", "m", "--data", "F", "--scale", "-1"], "--scale -1.0: expected a number above 0, or auto"),
        (["--model", "m", "--data", "F", "--effective-scale", "2"], "needs --scale auto"),
        (["--model", "m", "--data", "F", "--head-only"], "needs --train"),
    ],
)
def test_settings_refuse(file: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(StsConfig, [str(file) if a == "F" else a for a in arguments])
