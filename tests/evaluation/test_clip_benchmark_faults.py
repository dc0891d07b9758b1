"""What is mended in clip-benchmark while mmclip runs it: each test fails where upstream does not need it any more."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mmclip.evaluation import clip_benchmark as bridge
from mmclip.evaluation.clip_benchmark import STOCK_OUTPUT, accuracy, main
from tests.helpers.benchmarking import OURS, STOCK, flags, metrics_of, ours, stock

cli = pytest.importorskip("clip_benchmark.cli")
classification = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")
retrieval = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")
pytestmark = pytest.mark.filterwarnings("default")  # other people's code runs here, in this process


def test_stock_accuracy_stops_with_this_numpy_and_ours_says_the_same_by_hand() -> None:
    output, target = torch.tensor([[3.0, 2, 1], [1, 3, 2], [3, 2, 1]]), torch.tensor([0, 2, 2])
    assert accuracy(output, target, (1, 2)) == [1 / 3, 2 / 3]
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        with pytest.raises(TypeError):
            classification.accuracy(output, target)


def test_stock_stops_where_k_exceeds_the_candidates_and_ours_counts_them_all(
    plain: Path, learned_run: Path, tmp_path: Path
) -> None:
    assert ours(plain, learned_run, "dot", tmp_path, "--recall_k", 1, 1000)["text_retrieval_recall@1000"] == 1
    with pytest.raises(RuntimeError, match="out of range"):
        retrieval.recall_at_k(torch.eye(3), torch.eye(3, dtype=torch.bool), 4)
    assert retrieval.recall_at_k.__module__ == retrieval.__name__, "nothing stays replaced"


def test_recall_is_stocks_and_needs_no_memory_for_every_k() -> None:
    gen = torch.Generator().manual_seed(0)
    scores, positive = torch.randn(40, 30, generator=gen), torch.rand(40, 30, generator=gen) < 0.1
    positive[:, 3] = True
    for k in (1, 5, 29):
        assert torch.equal(bridge.recall_at_k(scores, positive, k), retrieval.recall_at_k(scores, positive, k))
    assert bridge.recall_at_k(scores, positive, 31).eq(1).all()


def test_stock_loses_the_default_output_of_a_name_with_a_slash_and_ours_names_model_and_scoring(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    default = [a for a in flags(plain, f"local-dir:{learned_run / 'model'}", "x") if a not in ("--output", "x")]
    with pytest.raises(FileNotFoundError):
        stock(monkeypatch, *default, *STOCK)
    main([*default, *OURS, "--scoring", "dot"])
    main([*default, "--model_type", "open_clip"])
    (mine,) = Path().glob("plain_own_local-dir-*-model_en_zeroshot_retrieval_dot.json")
    (other,) = Path().glob("plain_laion400m_e32_local-dir-*-model_en_zeroshot_retrieval.json")
    assert metrics_of(mine) != metrics_of(other)


def test_stock_stops_at_more_workers_than_shards_and_ours_takes_fewer(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = flags(plain, f"local-dir:{learned_run / 'model'}", tmp_path / "x.json", "--num_workers", 3)
    with pytest.raises(ValueError, match="shards"):
        stock(monkeypatch, *argv, *STOCK)
    alone = ours(plain, learned_run, "cosine", tmp_path)
    assert ours(plain, learned_run, "cosine", tmp_path, "--num_workers", 3) == alone


def test_stock_scores_in_bfloat16_on_a_cpu_and_ours_does_not(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    at_k = retrieval.recall_at_k
    monkeypatch.setattr(retrieval, "recall_at_k", lambda s, *a, **k: (seen.append(s.dtype), at_k(s, *a, **k))[1])
    model = f"local-dir:{learned_run / 'model'}"
    stock(monkeypatch, *flags(plain, model, tmp_path / "x.json", "--task", "zeroshot_retrieval"))
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    own = bridge.recall_at_k
    monkeypatch.setattr(bridge, "recall_at_k", lambda s, *a, **k: (seen.append(s.dtype), own(s, *a, **k))[1])
    main(flags(plain, model, tmp_path / "x.json", *OURS))
    assert set(seen) == {torch.float32}


def test_stock_takes_a_retrieval_folder_for_classes_and_ours_reads_what_it_is(
    plain: Path, learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = flags(plain, f"local-dir:{learned_run / 'model'}", tmp_path / "x.json")
    with pytest.raises(AssertionError, match="Classes not specified"):
        stock(monkeypatch, *argv, "--no_amp")
    main(argv)
    assert "image_retrieval_recall@1" in metrics_of(tmp_path / "x.json")


def test_help_and_the_default_output_are_clip_benchmarks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eval", "--help"])
    told = capsys.readouterr().out
    assert end.value.code == 0 and "--scoring {native,cosine,dot,qnorm,dnorm}" in told and "--load_clfs" in told
    monkeypatch.setattr(sys, "argv", ["x", "eval"])
    assert cli.get_parser_args()[1].output == STOCK_OUTPUT
