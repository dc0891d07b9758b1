"""evaluate_text.py on a tiny random model: results, TREC runs, comparisons, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmclip.commands.evaluate import run as evaluate_text_model
from mmclip.commands.evaluate import run_folder
from mmclip.config import TextEvaluateConfig, parse
from mmclip.errors import UserError
from mmclip.evaluation.results import load_results, save_results
from tests.helpers.texts import make_beir, make_bert
from tests.helpers.tiny import run_script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 queries, 60 documents, the last one empty."""
    root = make_beir(tmp_path_factory.mktemp("beir") / "tiny", queries=30, documents=60, splits=("test",))
    *documents, _ = (root / "corpus.jsonl").read_text().splitlines()
    (root / "corpus.jsonl").write_text("\n".join([*documents, '{"_id": "d59", "title": "", "text": ""}']) + "\n")
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


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
    assert results.json["lengths"] == {"query": 8, "document": 64}
    assert results.json["prompts"] == {"query": "", "document": ""}
    assert results.json["removed"] == ["Normalize"] and results.json["notes"] == []
    assert results.json["evaluation"]["native"] == {"gamma_q": 1.0, "gamma_d": 1.0}
    numbers = results.json["retrieval"]["q2d"]
    assert numbers["cosine"]["success@10"] > 0.2  # random weights, words in common: above the 10 of 60 of chance
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [f"{s}.trec" for s in sorted(numbers)]
    measure, qrels = ir_measures.nDCG @ 10, list(ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec")))
    for scoring in numbers:
        file = tmp_path / "runs" / f"{scoring}.trec"
        lines = file.read_text().splitlines()
        assert len(lines) == 30 * 20 and lines[0].split()[1::2] == ["Q0", "1", f"mmclip.{scoring}"]
        theirs = ir_measures.calc_aggregate([measure], qrels, ir_measures.read_trec_run(str(file)))[measure]
        assert numbers[scoring]["ndcg@10"] == pytest.approx(theirs, abs=1e-6)
    again = run_script("evaluate_text.py", "--data", folder, "--run", tmp_path / "runs" / "dot.trec")
    assert again.returncode == 0, again.stderr
    assert f"{numbers['dot']['ndcg@10']:.3f}"[1:] in again.stdout


def trained(model: Path, where: Path, loss: str = "q2d", gammas: tuple[float, float] = (1.0, 0.0)) -> Path:
    """The same model as the result of train_text.py."""
    shutil.copytree(model, where / "model")
    facts = {"task": "text", "loss": loss, "q2d_weight": None, "gamma_q": gammas[0], "gamma_d": gammas[1], "seed": 0,
             "norm": "x", "logit_scale_q2d": 9.0}  # fmt: skip
    (where / "model" / "mmclip.json").write_text(json.dumps(facts))
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
    scale = found.json["diagnostics"]["q2d"]["scale"]
    assert (scale["alpha"], scale["alpha_source"]) == (9.0, "given") and len(scale) == 3
    qnorm = ("--compare", places["qnorm"])
    output = evaluate(capsys, *qnorm, places["control"], places["cosine"], "--control", places["control"],
                      "--baseline", places["cosine"], "--verbose")  # fmt: skip
    assert all(word in output for word in ("detectable", "learned?", "useful?", "ndcg@10"))
    with pytest.raises(UserError, match="a baseline is a cosine run of the run's loss, q2d"):
        evaluate(capsys, *qnorm, "--control", places["control"], "--baseline", places["other"])
    with pytest.raises(UserError, match="nothing to give a verdict on"):
        evaluate(capsys, *qnorm, "--control", places["other"])
    assert "native = dot" in evaluate(capsys, *qnorm, "--verbose")
    file = places["qnorm"] / "runs" / "native.trec"
    beside = evaluate(capsys, "--model", tmp_path / "cosine", "--data", folder, "--run", file, "--run-depth", 0,
                      "--output", tmp_path / "o")  # fmt: skip
    assert "cosine (native)" in beside and not (tmp_path / "o" / "runs").exists()


@pytest.mark.parametrize(
    ("retrieval", "words"), [({}, "not a text evaluation"), ({"q2d": {"native": {}}}, "not the whole results")]
)
def test_damaged_results_are_one_line(folder, model, tmp_path: Path, capsys, retrieval: object, words: str) -> None:
    evaluate(capsys, "--model", model, "--data", folder, "--output", tmp_path / "o")
    results = load_results(str(tmp_path / "o"))
    results.json["retrieval"] = retrieval
    if not retrieval:
        results.json["data"]["n_queries"] = {}
    save_results(results, tmp_path / "damaged")
    with pytest.raises(UserError, match=words):
        evaluate(capsys, "--compare", tmp_path / "damaged")


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
    broken = shutil.copytree(folder, tmp_path / "beir")
    for name in ("corpus.jsonl", "qrels/test.tsv"):
        (broken / name).write_text((broken / name).read_text().replace("d8", "d 8"))
    with pytest.raises(UserError, match=r"document id 'd 8' has white space in it.*--run-depth 0 writes none"):
        evaluate_text_model(TextEvaluateConfig(model="no/such-model", data=str(broken)))


def test_config_does_not_import_torch() -> None:
    code = "import sys; import mmclip.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
