"""Text results as tables for a terminal: scorings down, what length does beside it, and runs against the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from mmclip.errors import printable
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import NATIVE, Results
from mmclip.evaluation.significance import significance
from mmclip.reporting.formats import NONE, delta, effect, number, rate
from mmclip.reporting.table_parts import column, gap, make_console, name_cell, new_table, row, titled
from mmclip.reporting.tables import print_verdict

Json = dict[str, Any]
COLUMNS = (("ndcg@10", "nDCG@10"), ("recall@100", "R@100"), ("mrr@10", "MRR@10"), ("success@1", "S@1"))
MAIN = "ndcg@10"
_LEGEND = """± half of the 95% interval over queries. R@100: share of a query's relevant documents among the best 100.
CV: std/mean of lengths. d: Cohen's d of document length, relevant against irrelevant among each query's 10 best by
cosine (topk), or documents relevant to some query against those relevant to none (corpus); its null is a control run.
"""
_PAIRED = """~ within noise: the paired interval of the difference holds 0. p: paired randomization test, two-sided; of
several runs corrected by Holm. detectable: the smallest true difference that these queries show four times in five.
"""


def text_table(results: Results, name: str | None = None) -> Group:
    """One run: a row for each scoring; those that rank alike share one, native first."""
    numbers: Json = results.json["retrieval"]["q2d"]
    table = new_table("scoring")
    for _, short in COLUMNS:
        column(table, "", short)
    column(table, "", "medR")
    groups: dict[str, list[str]] = {}
    for scoring in sorted(numbers, key=lambda s: s != NATIVE):
        groups.setdefault(str(numbers[scoring]), []).append(scoring)
    for names in groups.values():
        found = numbers[names[0]]
        cells = [rate(found[k], found["ci"][k]) for k, _ in COLUMNS]
        row(table, [" = ".join(names), *cells, f"{found['median_rank']:g}"], style="bold" if NATIVE in names else "")
    return titled(name if name is not None else results.json.get("model"), results, MAIN_POOL, table)


def text_lengths_table(runs: Mapping[str, Results]) -> Group:
    """Mean length and CV of queries and documents, Cohen's d of the documents."""
    table = new_table("run")
    for side in ("query", "document"):
        gap(table)
        column(table, f"|{side}|", "mean")
        column(table, "", "CV")
    column(table, "", "d topk")
    column(table, "", "d corpus")
    for name, run in runs.items():
        query, document = (run.json["magnitude"][side] for side in ("query", "document"))
        cells: list[Text | str] = [name_cell(name)]
        for side in (query, document):
            cells += ["", number(side["mean"]), rate(side["cv"])]
        row(table, [*cells, effect(document["cohens_d"]["topk"]), effect(document["cohens_d"]["corpus"])])
    return titled("embedding length", next(iter(runs.values())), MAIN_POOL, table)


def text_runs_table(runs: Mapping[str, Results]) -> Group:
    """Several runs: nDCG@10 native and by cosine, and native's difference to the first with what it is worth.

    Errors: UserError where the runs were not evaluated on the same data.
    """
    first = next(iter(runs.values()))
    table = _paired_columns("native", "cosine")
    found = significance(runs)
    for name, run in runs.items():
        numbers = run.json["retrieval"]["q2d"]
        native, cosine = (rate(numbers[s][MAIN], numbers[s]["ci"][MAIN]) for s in (NATIVE, "cosine"))
        row(table, [name_cell(name), Text(native, style="bold"), *_paired_cells(found.get(name)), cosine])
    return titled("nDCG@10", first, MAIN_POOL, table)


def files_table(files: Mapping[str, Mapping[str, tuple[float, float, float]]], paired: Sequence[Json | None]) -> Group:
    """TREC run files: name -> rate -> (mean, low, high), and what each has over the first row, None for nothing."""
    table = _paired_columns("nDCG@10", *(short for _, short in COLUMNS[1:]))
    for (name, rates), versus in zip(files.items(), paired, strict=True):
        cells = [rate(rates[k][0], list(rates[k][1:])) for k, _ in COLUMNS]
        row(table, [name_cell(name), Text(cells[0], style="bold"), *_paired_cells(versus), *cells[1:]])
    return titled("TREC run files", None, MAIN_POOL, table)


def _paired_columns(first: str, *others: str) -> Any:
    table = new_table("run")
    for name in (first, "to the first", "p", "detectable", *others):
        column(table, "", name)
    return table


def _paired_cells(found: Json | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    p = found.get("p_holm", found["p"])
    least = found["smallest_detectable"]
    return [delta(found), f"{p:.4f}", NONE if least is None else f"{least:.3f}"]


def text_notes(results: Results) -> list[str]:
    """What the tables cannot say: empty documents, numbers that do not exist and why, ties, too few documents."""
    said = [printable(note) for note in results.json["data"].get("notes", [])]
    effects = results.json["magnitude"]["document"]["cohens_d"]
    said += [f"|document| d {k}: {printable(r)}" for k in ("topk", "corpus") if (r := effects.get(f"{k}_reason"))]
    numbers = results.json["retrieval"]["q2d"]
    if few := numbers[NATIVE].get("clamped_k"):
        said.append(f"{results.json['data']['n_documents']} documents: {', '.join(few)} take all of them")
    if ties := max(n["tied_queries"] for n in numbers.values()):
        said.append(f"tied queries, at most {ties}: counted against the model")
    return said


def print_text_run(results: Results, name: str | None = None, console: Console | None = None) -> None:
    console = console or make_console()
    console.print(text_table(results, name))
    console.print(Text(_LEGEND, style="dim"))
    console.print(text_lengths_table({name if name is not None else str(results.json.get("model")): results}))
    for note in text_notes(results):
        console.print(Text(note, style="dim"))


def encoded_unlike(runs: Mapping[str, Results]) -> str | None:
    """What runs differ in beside their weights: the same texts, cut or prompted otherwise. None where they do not."""
    how = {}
    for name, run in runs.items():
        tokens, prompts = run.json.get("lengths") or {}, run.json.get("prompts") or {}
        how[name] = ", ".join(
            f"{role} {tokens.get(role, 'not told')} tokens" + (f" after {prompts[role]!r}" if prompts.get(role) else "")
            for role in ("query", "document")
        )
    if len(set(how.values())) < 2:
        return None
    return "not encoded alike, which is part of the differences: " + "; ".join(
        f"{printable(name, 40)}: {printable(told, 120)}" for name, told in how.items()
    )


def print_text_comparison(
    runs: Mapping[str, Results], verdicts: Iterable[Json] = (), console: Console | None = None
) -> None:
    """Several runs over the same data, the first being what the others are measured against; then the verdicts.

    Errors: UserError where the runs were not evaluated on the same data.
    """
    console = console or make_console()
    console.print(text_runs_table(runs))
    console.print(Text(_PAIRED, style="dim"))
    if told := encoded_unlike(runs):
        console.print(Text(told + "\n"))
    console.print(text_lengths_table(runs))
    for found in verdicts:
        print_verdict(found, console)
