"""evaluate_text.py as a user starts it, on a tiny random model and a folder written on the spot."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmclip.commands.evaluate import run as evaluate_text_model
from mmclip.commands.evaluate import run_folder
from mmclip.config import TextEvaluateConfig, parse
from mmclip.errors import UserError
from mmclip.evaluation.results import load_results, save_results
from tests.helpers.tiny import run_script

WORDS = [f"{a}{b}" for a in ("ba", "de", "fi", "go", "ku", "la") for b in ("ck", "l", "mp", "nd", "r")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 queries of two words, 60 documents of which the first thirty hold them, the last one empty."""
    root = tmp_path_factory.mktemp("beir") / "tiny"
    (root / "qrels").mkdir(parents=True)
    rng = np.random.default_rng(0)
    asked = [list(rng.choice(WORDS, 2, replace=False)) for _ in range(30)]
    texts = [" ".join([*(asked[d] if d < 30 else []), *rng.choice(WORDS, 4)]) for d in range(59)] + [""]
    write = {
        "queries.jsonl": [{"_id": f"q{i}", "text": " ".join(q)} for i, q in enumerate(asked)],
        "corpus.jsonl": [{"_id": f"d{i}", "title": "", "text": t} for i, t in enumerate(texts)],
    }
    for name, rows in write.items():
        (root / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    judged = [f"q{i}\td{i}\t{1 + i % 2}" for i in range(30)]
    (root / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one layer and width 32 with mean pooling and a Normalize module at its end."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    root = tmp_path_factory.mktemp("text-model")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]",
                                   cls_token="[CLS]", sep_token="[SEP]", model_max_length=32)  # fmt: skip
    config = BertConfig(vocab_size=len(names), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=32, initializer_range=0.3)  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(str(root / "plain"))
    fast.save_pretrained(str(root / "plain"))
    trunk = Transformer(str(root / "plain"))
    SentenceTransformer(modules=[trunk, Pooling(32, "mean"), Normalize()], device="cpu").save_pretrained(
        str(root / "st"), create_model_card=False
    )
    return root / "st"


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    evaluate_text_model(parse(TextEvaluateConfig, [str(a) for a in arguments]))
    return capsys.readouterr().out


def test_a_model_is_evaluated_and_its_files_say_what_the_table_says(folder: Path, model: Path, tmp_path: Path) -> None:
    import ir_measures

    done = run_script("evaluate_text.py", "--model", model, "--data", folder, "--output", tmp_path, "--query-length", 8,
                      "--run-depth", 20)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 empty document (d59) indexed, 0 of them judged relevant" in done.stderr
    assert "(Normalize taken off)" in done.stderr
    assert "nDCG@10" in done.stdout and "60 documents" in done.stdout and len(done.stdout.splitlines()) <= 10
    results = load_results(tmp_path)
    assert results.json["lengths"] == {"query": 8, "document": 32}
    assert results.json["prompts"] == {"query": "", "document": ""}
    assert results.json["removed"] == ["Normalize"] and results.json["notes"] == []
    assert results.json["evaluation"]["native"] == {"gamma_q": 1.0, "gamma_d": 1.0}
    numbers = results.json["retrieval"]["q2d"]
    assert numbers["cosine"]["success@10"] > 0.2  # random weights, words in common: above the 10 of 60 of chance
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [f"{s}.trec" for s in sorted(numbers)]
    for scoring in numbers:
        lines = (tmp_path / "runs" / f"{scoring}.trec").read_text().splitlines()
        assert len(lines) == 30 * 20 and lines[0].split()[1::2] == ["Q0", "1", f"mmclip.{scoring}"]
        theirs = ir_measures.calc_aggregate(
            [ir_measures.nDCG @ 10],
            ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec")),
            ir_measures.read_trec_run(str(tmp_path / "runs" / f"{scoring}.trec")),
        )
        assert numbers[scoring]["ndcg@10"] == pytest.approx(theirs[ir_measures.nDCG @ 10], abs=1e-6)
    # the written file, measured as anybody's run beside nothing
    again = run_script("evaluate_text.py", "--data", folder, "--run", tmp_path / "runs" / "dot.trec")
    assert again.returncode == 0, again.stderr
    assert f"{numbers['dot']['ndcg@10']:.3f}"[1:] in again.stdout


def trained(model: Path, where: Path, loss: str = "q2d", gammas=(1.0, 0.0), **facts: object) -> Path:
    """The same model as a run of train_text.py leaves it, its scoring being what ``facts`` say."""
    shutil.copytree(model, where / "model")
    said = {"task": "text", "loss": loss, "q2d_weight": None, "gamma_q": gammas[0], "gamma_d": gammas[1], "seed": 0,
            "norm": "x", "logit_scale_q2d": 9.0} | facts  # fmt: skip
    (where / "model" / "mmclip.json").write_text(json.dumps(said))
    (where / "config.yaml").write_text("")
    return where


def test_runs_are_compared_with_p_and_judged(folder: Path, model: Path, tmp_path: Path, capsys) -> None:
    places = {}
    for name, loss, gammas in (
        ("qnorm", "q2d", (1.0, 0.0)),
        ("control", "q2d", (0.0, 1.0)),
        ("cosine", "q2d", (1.0, 1.0)),
        ("other", "both", (1.0, 1.0)),
    ):
        run = trained(model, tmp_path / name, loss, gammas)
        assert run_folder(str(run)) == run_folder(str(run / "model")) == run
        evaluate(capsys, "--model", run, "--data", folder)
        places[name] = run / "evaluations" / "tiny-test"
    found = load_results(str(places["qnorm"]))
    assert found.json["retrieval"]["q2d"]["native"] == found.json["retrieval"]["q2d"]["dot"]
    assert found.json["diagnostics"]["q2d"]["scale"] == {"alpha": 9.0, "alpha_source": "given"} | {
        "effective_scale": found.json["diagnostics"]["q2d"]["scale"]["effective_scale"]
    }
    told = evaluate(capsys, "--compare", places["qnorm"], places["control"], places["cosine"],
                    "--control", places["control"], "--baseline", places["cosine"], "--verbose")  # fmt: skip
    assert "detectable" in told and "learned?" in told and "useful?" in told and "ndcg@10" in told
    with pytest.raises(UserError, match="a baseline is a cosine run of the run's loss, q2d"):
        evaluate(capsys, "--compare", places["qnorm"], "--control", places["control"], "--baseline", places["other"])
    with pytest.raises(UserError, match="nothing to give a verdict on"):
        evaluate(capsys, "--compare", places["qnorm"], "--control", places["other"])
    assert "native = dot" in evaluate(capsys, "--compare", places["qnorm"], "--verbose")
    file = places["qnorm"] / "runs" / "native.trec"
    beside = evaluate(capsys, "--model", tmp_path / "cosine", "--data", folder, "--run", file, "--run-depth", 0,
                      "--output", tmp_path / "o")  # fmt: skip
    assert "cosine (native)" in beside and not (tmp_path / "o" / "runs").exists()


def test_finished_runs_that_are_none_are_one_line(folder: Path, model: Path, tmp_path: Path, capsys) -> None:
    run = trained(model, tmp_path / "r")
    evaluate(capsys, "--model", run, "--data", folder, "--output", tmp_path / "o")
    results = load_results(str(tmp_path / "o"))
    results.json["retrieval"] = results.json["data"]["n_queries"] = {}
    save_results(results, tmp_path / "clip")
    with pytest.raises(UserError, match="not a text evaluation"):
        evaluate(capsys, "--compare", tmp_path / "clip")
    results.json["retrieval"] = {"q2d": {"native": {}}}
    save_results(results, tmp_path / "part")
    with pytest.raises(UserError, match="not the whole results"):
        load_results(str(tmp_path / "part"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to do"),
        (["--model", "m"], "--model m needs --data"),
        (["--run", __file__], "needs --data"),
        (["--data", "d", "--run", "missing.trec"], "missing.trec: expected an existing file"),
        (["--compare", "a", "--baseline", "b"], "needs --control"),
        (["--model", "./nowhere", "--data", "d"], "no such folder"),
        (["--compare", "a", "--run-depth", "-1"], "--run-depth -1: expected a whole number of at least 0"),
        (["--compare", "a", "--block-bytes", "9"], "--block-bytes 9"),
        (["--modle", "a"], "--model"),
    ],
)
def test_bad_flags_are_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        parse(TextEvaluateConfig, arguments)
    assert "\n" not in str(error.value)


def test_ids_with_white_space_are_refused_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "beir"
    shutil.copytree(folder, broken)
    for name in ("corpus.jsonl", "qrels/test.tsv"):
        (broken / name).write_text((broken / name).read_text().replace("d7", "d 7"))
    settings = TextEvaluateConfig(model="no/such-model", data=str(broken))
    with pytest.raises(UserError, match=r"document id 'd 7' has white space in it.*--run-depth 0 writes none"):
        evaluate_text_model(settings)


def test_help_does_not_wait_for_torch() -> None:
    import subprocess
    import sys

    code = "import sys; import mmclip.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
