"""Tables and the picture: hostile names, narrow and piped output, numbers never cut."""

from __future__ import annotations

import copy
import io
import re
import warnings

import pytest
import torch
from rich.console import Console

from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.evaluation.comparison import verdict
from mmclip.evaluation.results import Results
from mmclip.reporting.figures import tradeoff_figure, write_png
from mmclip.reporting.table_parts import make_console
from mmclip.reporting.tables import groups_table, notes, print_comparison, print_run, print_verdict, runs_table
from mmclip.similarity import Exponents
from tests.helpers.evaluating import evaluate_clip

HOSTILE = "[red]x[/red] [/] \x1b[31m\n:smile: \u202e$_^ 漢字" + "n" * 80
N = 40


def run_of(native: Exponents, loss: str, name: str = "m", seed: int = 0) -> Results:
    gen = torch.Generator().manual_seed(0)
    image = torch.randn(N, 12, generator=gen)
    text = image.repeat_interleave(2, 0) + torch.randn(2 * N, 12, generator=gen)
    own = torch.Generator().manual_seed(seed)
    data = Embeddings(
        image=image * (1 + torch.rand(N, 1, generator=own)),
        text=text,
        pairs=torch.tensor([[t // 2, t] for t in range(2 * N)]),
        image_ids=[HOSTILE + str(i) for i in range(N)],
        captions=[HOSTILE + " word" * (t % 12) for t in range(2 * N)],
        levels=["full", HOSTILE] * N,
        n_objects=[i % 4 for i in range(N)],
        distractors=[
            Distractors("distractors", torch.randn(9, 12, generator=gen), torch.randn(9, 12, generator=gen) * 50)
        ],
    )
    return evaluate_clip(data, native, {"model": name, "trained_with": {"loss": loss}}, resamples=60)


@pytest.fixture(scope="module")
def runs() -> dict[str, Results]:
    return {
        "sym-cosine": run_of(Exponents(1.0, 1.0), "sym"),
        HOSTILE: run_of(Exponents(1.0, 0.0), "asym-t2i", HOSTILE, 1),
        "_$control": run_of(Exponents(1.0, 1.0), "asym-t2i", seed=2),
    }


def printed(show, *args) -> str:
    out = io.StringIO()
    show(*args, console=make_console(out))
    return out.getvalue()


def test_everything_prints_within_the_width_without_colour_or_cut_numbers(runs):
    baseline, run, control = runs.values()
    text = printed(print_comparison, runs, [verdict(run, control, baseline)]) + printed(print_run, run)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert max(map(len, text.splitlines())) <= make_console(io.StringIO()).width
    assert "[red]x[/red]" in text  # shown, not obeyed
    assert ":smile:" in text
    assert not re.search(r"[±.\d]…", text)
    assert re.search(r"^native = .* +\.\d{3} ±\.\d{3}", text, re.M)
    assert "learned? " in text
    assert "useful? " in text
    assert "degenerate: every candidate is relevant to 2 queries" in text


def test_both_directions_stand_in_one_row(runs):
    out = io.StringIO()
    make_console(out).print(runs_table(runs))
    lines = out.getvalue().splitlines()
    assert "i2t" in lines[1]
    assert "t2i" in lines[1]
    first, second = (next(line for line in lines if line.startswith(name)) for name in ("sym-cosine", "_$control"))
    assert len(re.findall(r"\.\d{3} ±\.\d{3}", first)) == 4  # native and cosine, twice
    assert len(re.findall(r"[+-]\.\d{3} ±\.\d{3}", second)) == 2  # the differences to the first


def test_a_narrow_console_cuts_names_not_numbers(runs):
    out = io.StringIO()
    Console(file=out, width=100).print(groups_table(runs, "text", "n_words"))
    assert not re.search(r"[±.\d]…", out.getvalue())
    assert "Spearman" in out.getvalue()
    assert groups_table(runs, "text", "colour") is None


def test_ties_and_a_clamped_k_are_told(runs):
    x = torch.ones(4, 3)
    data = Embeddings(x, x, torch.tensor([[i, i] for i in range(4)]), list("abcd"), list("abcd"))
    tied = evaluate_clip(data, Exponents(1.0, 0.0), {"model": "m"}, resamples=10)
    assert "tied queries, at most 4 i2t, 4 t2i: counted against the model" in notes({"m": tied})
    assert "at most 4 i2t" in printed(print_run, tied)
    assert "i2t has 4 candidates: success@5, success@10, recall@5, mrr@10, ndcg@10 take all of them" in notes(
        {"m": tied}
    )


def test_an_open_verdict_prints_its_reason(runs):
    _, run, control = runs.values()
    found = verdict(run, control)
    found["learned"] = {"verdict": None, "reason": "r", "sentence": "No verdict: [b]r[/b]."}
    assert "learned? open (t2i, pool retrieval): No verdict: [b]r[/b]." in printed(print_verdict, found)


def test_the_picture_is_drawn_for_any_names(runs, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = write_png(tradeoff_figure(runs), tmp_path / "t.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["t.png"]


def test_no_number_of_the_widest_table_is_cut(runs):
    """Labels of merged scorings are long: every header and every median rank must still be whole."""
    for line in printed(print_run, next(iter(runs.values()))).splitlines():
        assert "…" not in line.replace("\\x1b…", "")
        if line.lstrip().startswith("S@1"):
            assert line.split().count("nDCG") == 2 and line.split().count("medR") == 2


def test_runs_that_were_evaluated_with_other_pools_or_groups_are_shown_by_what_they_share(runs):
    other = copy.deepcopy(runs["_$control"])
    del other.json["pools"]["full"]
    for side in other.json["magnitude"].values():
        side["by_document"].pop("n_objects", None)
        side["by_document"]["n_words"] = None
    text = printed(print_comparison, {"sym-cosine": runs["sym-cosine"], "other": other})
    assert "pool full" not in text and "other" in text


def test_numbers_of_a_results_file_that_are_none_cannot_control_a_terminal(runs):
    odd = copy.deepcopy(runs["_$control"])
    odd.json["data"]["n_images"] = odd.json["data"]["n_queries"]["i2t"] = HOSTILE
    assert "\x1b" not in printed(print_run, odd) and "\u202e" not in printed(print_run, odd)
