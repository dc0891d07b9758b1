"""Training on pairs: the loss against sentence-transformers' own, the split, restarting, and what a run tells."""

from __future__ import annotations

import json
import subprocess
import sys
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
from mmclip.similarity import Direction, Normalization
from mmclip.tasks.sts import (
    ResidualHead,
    RoleMSELoss,
    StsPairs,
    open_sts,
    same_sentence,
    split_pairs,
    train_pairs,
    without_sentences_of,
)
from tests.helpers.tiny import ROOT, run_script

WORDS = [f"w{i}" for i in range(30)]


@pytest.fixture(scope="module")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one layer as a sentence-transformers folder, without dropout."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertTokenizerFast(vocab={w: i for i, w in enumerate(vocabulary)}).save_pretrained(str(folder))
    config = BertConfig(vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(str(folder))
    trunk = Transformer(str(folder))
    model = SentenceTransformer(modules=[trunk, Pooling(32, "mean"), Normalize()], device="cpu")
    target = tmp_path_factory.mktemp("model") / "tiny"
    model.save_pretrained(str(target), create_model_card=False)
    return target


@pytest.fixture
def model(tiny_text: Path) -> TextEncoder:
    return load_text_model(str(tiny_text))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pairs, whose score is the share of words in common; some sentences stand in several pairs."""
    rng = np.random.default_rng(0)
    rows = ["score\tsentence1\tsentence2"]
    for i in range(60):
        a = rng.choice(WORDS, 5, replace=False)
        b = np.concatenate([a[: i % 6], rng.choice(WORDS, 5 - i % 6, replace=False)])
        first = "w0 w1 w2" if i % 10 == 0 else " ".join(a)
        rows.append(f"{float(i % 6)}\t{first}\t{' '.join(b)}")
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def settings(model: Path, file: Path, output: Path, **others: Any) -> StsConfig:
    about = {"holdout": 0.3, "epochs": 1, "batch_size": 16, "lr": 1e-3, "device": "cpu"} | others
    return StsConfig(model=str(model), train=str(file), output=str(output), **about)


def features(model: TextEncoder, pairs: StsPairs) -> list[dict[str, torch.Tensor]]:
    return [dict(model.encoder.preprocess(side)) for side in (pairs.first, pairs.second)]


def test_cosine_is_sentence_transformers_cosine_similarity_loss(model: TextEncoder, file: Path) -> None:
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    pairs = open_sts(file)
    labels = torch.tensor(pairs.scores / 5, dtype=torch.float32)
    found = []
    for loss in (RoleMSELoss(model.encoder, "cosine"), CosineSimilarityLoss(model.encoder)):
        model.encoder.zero_grad()
        value = loss(features(model, pairs), labels)
        value.backward()
        found.append((value, torch.cat([p.grad.flatten() for p in model.encoder.parameters() if p.grad is not None])))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", list(Normalization))
@pytest.mark.parametrize("scale", [None, 0.3, "auto"])
def test_value_is_the_papers_form(model: TextEncoder, norm: Normalization, scale: float | str | None) -> None:
    torch.manual_seed(0)
    q, d, y = 3 * torch.randn(9, 4), 2 * torch.randn(9, 4), torch.rand(9)
    loss = RoleMSELoss(model.encoder, norm, scale, effective_scale=0.5 if scale == "auto" else 1.0)
    with torch.no_grad():
        gq, gd = (float(g) for g in loss.similarity.exponents)
    lq, ld = q.norm(dim=1), d.norm(dim=1)
    alpha = {None: 1.0 if norm == "cosine" else PAPER_SCALE, 0.3: 0.3,
             "auto": 0.5 / float((lq ** (1 - gq)).mean() * (ld ** (1 - gd)).mean())}[scale]  # fmt: skip
    naive = ((alpha * (q * d).sum(1) / (lq**gq * ld**gd) - y) ** 2).mean()
    torch.testing.assert_close(loss.of_vectors(q, d, y), naive)
    assert loss.alpha == pytest.approx(alpha, rel=1e-5)
    loss.of_vectors(10 * q, d, y)  # a later batch does not calibrate again
    assert loss.alpha == pytest.approx(alpha, rel=1e-5)
    trained = {n for n, p in loss.similarity.named_parameters() if p.requires_grad}
    assert trained == ({"gamma_hat_q", "gamma_hat_d"} if norm == "learned" else set())


def test_loss_refuses_unit_vectors_and_scales_that_are_none(tiny_text: Path, model: TextEncoder) -> None:
    whole = load_text_model(str(tiny_text), keep_normalize=True)
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
    data = Dataset.from_dict(
        {"sentence1": pairs.first, "sentence2": pairs.second, "score": (pairs.scores / 5).tolist()}
    )
    loss = RoleMSELoss(model.encoder, "learned", "auto")
    before = [p.detach().clone() for p in (loss.similarity.gamma_hat_q, next(model.encoder.parameters()))]
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, learning_rate=1e-2, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    SentenceTransformerTrainer(model.encoder, arguments, train_dataset=data, loss=loss).train()
    after = [loss.similarity.gamma_hat_q, next(model.encoder.parameters())]
    assert all(not torch.equal(a.cpu(), b) for a, b in zip(after, before, strict=True))
    assert loss.similarity.has_norm_stats(Direction.Q2D)


def test_no_sentence_stands_on_both_sides_of_a_split(file: Path, tmp_path: Path) -> None:
    pairs = open_sts(file)
    for seed in range(5):
        train, held = split_pairs(pairs, 0.3, seed)
        sides = [{same_sentence(s) for s in p.first + p.second} for p in (train, held)]
        assert not sides[0] & sides[1]
        assert len(train) + len(held) == 60
        assert 18 <= len(held) <= 18 + np.bincount(pairs.groups).max()
        again = split_pairs(pairs, 0.3, seed)[1]
        assert again.fingerprint() == held.fingerprint()
    assert len({split_pairs(pairs, 0.3, s)[1].fingerprint() for s in range(5)}) > 1
    for share in (0.001, 0.999):
        with pytest.raises(UserError, match="at least 3 are needed"):
            split_pairs(pairs, share, 0)
    kept = without_sentences_of(pairs, held)
    assert kept.fingerprint() == train.fingerprint()
    assert kept.notes[0].startswith(f"{len(held)} training pairs left out")


@pytest.mark.parametrize("head", [False, True])
def test_training_lowers_the_loss_and_the_seed_says_all(
    tiny_text: Path, file: Path, tmp_path: Path, head: bool
) -> None:
    pairs = open_sts(file)
    about = settings(tiny_text, file, tmp_path, epochs=3, scale=1.0, lr=1e-2, head_only=head)
    found = []
    for seed in (1, 2, 1):
        model = load_text_model(str(tiny_text))
        start = {k: v.clone() for k, v in model.encoder.state_dict().items()}
        vectors = model.encode(pairs.first, "query").double(), model.encode(pairs.second, "document").double()
        loss, layer, history = train_pairs(model, "qnorm", pairs, about, seed, vectors if head else None)
        found.append(history)
        moved = any(not torch.equal(v, start[k]) for k, v in model.encoder.state_dict().items())
        assert moved != head
        assert (layer is not None) == head
        assert loss.alpha == pytest.approx(1)
    assert found[0] == found[2] != found[1]
    assert np.mean(found[0][-4:]) < 0.8 * np.mean(found[0][:2])


def test_a_head_begins_as_none() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(ResidualHead(8).transform((x, 2 * x)), (x, 2 * x), atol=1e-6, rtol=1e-6)


def test_a_repeated_command_trains_nothing_again_and_a_damaged_run_is(
    tiny_text: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    norms = ["cosine", "qnorm"]
    first = run_sts(settings(tiny_text, file, tmp_path, norms=norms, seeds=[0, 1]))
    files = sorted((tmp_path / "runs").glob("*.json"))
    assert [f.name.rsplit("-", 1)[0] for f in files] == ["cosine-seed0", "cosine-seed1", "qnorm-seed0", "qnorm-seed1"]
    written = [f.stat().st_mtime_ns for f in files]
    second = run_sts(settings(tiny_text, file, tmp_path, norms=norms, seeds=[0, 1]))
    assert second == first == json.loads((tmp_path / "sts.json").read_text(encoding="utf-8"))
    assert [f.stat().st_mtime_ns for f in files] == written
    files[0].write_text("{", encoding="utf-8")
    third = run_sts(settings(tiny_text, file, tmp_path, norms=norms, seeds=[0, 1]))
    assert third["norms"] == first["norms"]
    assert [f.stat().st_mtime_ns == w for f, w in zip(files, written, strict=True)] == [False, True, True, True]
    run_sts(settings(tiny_text, file, tmp_path, norms=["qnorm"], seeds=[0], scale="auto"))
    assert len(list((tmp_path / "runs").glob("*.json"))) == 5  # another setting is another run
    assert "less" in capsys.readouterr().out


def test_what_a_report_tells(tiny_text: Path, file: Path, tmp_path: Path) -> None:
    norms = ["cosine", "dot", "qnorm", "learned"]
    report = run_sts(settings(tiny_text, file, tmp_path, norms=norms, seeds=[0, 1], scale="auto", head_only=True))
    assert report["removed"] == ["Normalize"]
    assert report["train"]["label"] == "score / 5"
    assert report["data"]["holdout"] == 0.3
    assert report["data"]["n_pairs"] + report["train"]["n_pairs"] == 60
    for run in report["runs"]:
        assert run["effective_scale"]["start"] == pytest.approx(1, rel=0.2)  # the first batch's lengths, not these
        found = run["evaluation"]["scorings"]
        own = found["native"]["spearman"]
        assert run["norm"] == "learned" or own == found[run["norm"]]["spearman"]
    for norm, found in report["norms"].items():
        seeds = found["native"]["seeds"]
        assert found["native"]["spearman"] == pytest.approx(np.mean(list(seeds.values())))
        assert set(seeds) == {"0", "1"}
        minus = found["native"]["minus"]
        assert set(minus) == ({"native of cosine", "native of dot", "untrained"} - {f"native of {norm}"}) - (
            {"untrained"} if norm == "learned" else set()
        )
        for other in minus.values():
            assert other["ci"][0] <= other["delta"] <= other["ci"][1]
    lines = (tmp_path / "sts.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 5 * (1 + 8 + 4)
    assert lines[1].startswith("auto 1,untrained,,cosine,")


def test_the_script_scores_a_file_and_refuses_in_one_line(tiny_text: Path, file: Path, tmp_path: Path) -> None:
    done = run_script("sts.py", "--model", tiny_text, "--data", file, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "dnorm" in done.stdout
    report = json.loads((tmp_path / "out" / "sts.json").read_text(encoding="utf-8"))
    assert set(report["untrained"]["scorings"]) == {"cosine", "dot", "qnorm", "dnorm", "native"}
    assert "norms" not in report
    bad = tmp_path / "bad.tsv"
    bad.write_text("score\tsentence1\tsentence2\n1\ta\tb\nx\ta\tb\n", encoding="utf-8")
    done = run_script("sts.py", "--model", tiny_text, "--data", bad, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {bad}: line 3: the score is a number, got 'x'"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing"),
        (["--model", "m"], "--data is missing"),
        (["--model", "m", "--data", "none.tsv"], "none.tsv: expected an existing file"),
        (["--model", "m", "--holdout", "0.3"], "needs --train"),
        (["--model", "m", "--train", "F"], "either --data FILE, or --holdout"),
        (["--model", "m", "--train", "F", "--data", "F", "--holdout", "0.3"], "either --data FILE, or --holdout"),
        (["--model", "m", "--train", "F", "--holdout", "1"], "between 0 and 1"),
        (["--model", "m", "--data", "F", "--norms", "cosin"], "--norms cosin: expected one of cosine, dot"),
        (["--model", "m", "--data", "F", "--scale", "high"], "--scale high: expected a number above 0, or auto"),
        (["--model", "m", "--data", "F", "--scale", "-1"], "--scale -1.0: expected a number above 0, or auto"),
        (["--model", "m", "--data", "F", "--effective-scale", "2"], "needs --scale auto"),
        (["--model", "m", "--data", "F", "--seeds", "-1"], "--seeds -1"),
        (["--model", "m", "--data", "F", "--head-only"], "needs --train"),
    ],
)
def test_settings_refuse(file: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(StsConfig, [str(file) if a == "F" else a for a in arguments])


def test_settings_import_nothing_heavy() -> None:
    code = "import sys, mmclip.config; sys.exit('torch' in sys.modules or 'sentence_transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
