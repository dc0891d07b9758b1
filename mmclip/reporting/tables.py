"""Results as tables for a terminal or a file: the two directions side by side, lengths, and what length follows.

Everything that comes from data or from a person (run names, models, levels) is put into cells as plain text, never as
markup, on one line. Rates are fractions without the leading zero; ± is half of the 95% interval.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from mmclip.errors import printable
from mmclip.evaluation import comparison
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, Results
from mmclip.reporting.backwards_tables import backwards_table, seeds_table
from mmclip.reporting.formats import NONE, delta, effect, number, rate
from mmclip.reporting.table_parts import NAME_WIDTH, column, gap, make_console, name_cell, new_table, row, titled
from mmclip.similarity import CLIP_DIRECTIONS

Json = dict[str, Any]
COLUMNS = (
    ("success@1", "S@1"),
    ("success@5", "S@5"),
    ("success@10", "S@10"),
    ("recall@5", "R@5"),
    ("mrr@10", "MRR"),
    ("ndcg@10", "nDCG"),
)
FEW_CLUSTERS = 20  # a percentile bootstrap over fewer covers visibly less than it promises
_LEGEND = """pools: retrieval, all images and captions; full, captions that describe everything; distractors, more
candidates that match nothing. S@k: a relevant one among the best k; R@5: share of all relevant ones,
small where a caption fits many images. d: Cohen's d of length, relevant against irrelevant among each
query's 10 best by cosine (topk), or documents relevant to some query against those relevant to none
(corpus); its null is a control run, not 0. CV: std/mean.
"""
_ATTRIBUTES = {"n_words": "words in the caption", "n_objects": "objects in the picture", "level": "caption level"}


def run_table(results: Results, name: str | None = None, pool: str = MAIN_POOL) -> Group:
    """One run: a row for each scoring, the two directions side by side."""
    section = results.pools[pool]
    table = new_table("")
    for direction in CLIP_DIRECTIONS:
        gap(table)
        for i, (_, short) in enumerate(COLUMNS):
            column(table, direction.value if i == 0 else "", short)
        column(table, "", "medR")
    for names in _alike(section["retrieval"]):
        cells = [" = ".join(names)]
        for direction in CLIP_DIRECTIONS:
            numbers = section["retrieval"][direction.value].get(names[0])
            if numbers is None:  # reversed and corrected exist where the other direction was trained
                cells += [""] * (len(COLUMNS) + 2)
                continue
            rates = [rate(numbers[k], numbers["ci"][k] if k == "success@1" else None) for k, _ in COLUMNS]
            cells += ["", *rates, f"{numbers['median_rank']:g}"]
        row(table, cells, style="bold" if NATIVE in names else "")
    return titled(name if name is not None else results.json.get("model"), results, pool, table)


def _alike(retrieval: Json) -> list[list[str]]:
    """Scorings grouped by equal numbers in both directions, native first: four normalizations are two rankings."""
    groups: dict[str, list[str]] = {}
    every = dict.fromkeys(s for d in CLIP_DIRECTIONS for s in retrieval[d.value])
    for scoring in sorted(every, key=lambda s: s != NATIVE):
        numbers = json.dumps([retrieval[d.value].get(scoring) for d in CLIP_DIRECTIONS], sort_keys=True)
        groups.setdefault(numbers, []).append(scoring)
    return list(groups.values())


def runs_table(runs: Mapping[str, Results], pool: str = MAIN_POOL) -> Group:
    """Several runs: success@1 native and by cosine in both directions, and native's difference to the first run.

    Errors: UserError where the runs were not evaluated on the same data.
    """
    first = next(iter(runs.values()))
    table = new_table("run")
    for direction in CLIP_DIRECTIONS:
        gap(table)
        column(table, direction.value, "native")
        column(table, "", "to the first")
        column(table, "", "cosine")
    for i, (name, run) in enumerate(runs.items()):
        changes = comparison.compare(first, run)[pool] if i else None
        cells: list[Text | str] = [name_cell(name)]
        for direction in CLIP_DIRECTIONS:
            numbers = run.pools[pool]["retrieval"][direction.value]
            native, cosine = (rate(numbers[s]["success@1"], numbers[s]["ci"]["success@1"]) for s in (NATIVE, "cosine"))
            change = delta(changes[direction.value][NATIVE]["success@1"]) if changes else ""
            cells += ["", Text(native, style="bold"), change, cosine]
        row(table, cells)
    return titled("success@1", first, pool, table)


def lengths_table(runs: Mapping[str, Results], pool: str = MAIN_POOL) -> Group:
    """Several runs (or one): mean length, CV and Cohen's d of each side, as the documents of a direction."""
    table = new_table("run")
    for direction in reversed(CLIP_DIRECTIONS):
        gap(table)
        column(table, f"|{direction.document_side}|", "mean")
        column(table, "", "CV")
        column(table, f"in {direction.value}", "d topk")
        column(table, "", "d corpus")
    for name, run in runs.items():
        cells: list[Text | str] = [name_cell(name)]
        for direction in reversed(CLIP_DIRECTIONS):
            side = run.pools[pool]["magnitude"][direction.document_side]
            d = side["cohens_d"]
            cells += ["", number(side["mean"]), rate(side["cv"]), effect(d["topk"]), effect(d["corpus"])]
        row(table, cells)
    return titled("embedding length", next(iter(runs.values())), pool, table)


def groups_table(
    runs: Mapping[str, Results], side: str, attribute: str, pool: str = MAIN_POOL, of_queries: bool = False
) -> Group | None:
    """Mean length and d(topk) of a side's documents by an attribute: groups across, runs down.

    The attribute is the documents' own or, ``of_queries``, that of the queries which rank them; n counts either.
    None where the data does not have the attribute.
    """
    by = "by_query" if of_queries else "by_document"
    sections = {name: run.pools[pool]["magnitude"][side] for name, run in runs.items()}
    first = next(iter(sections.values()))
    groups = first[by].get(attribute)
    if not groups:
        return None
    table = new_table("run")
    table.add_column(Text(""), no_wrap=True)
    for group in groups:
        column(table, "", group["group"])
    ordered = not of_queries and attribute in first["spearman"]
    if ordered:
        column(table, "", "Spearman")
    row(table, ["", " n", *(str(group["n"]) for group in groups)])
    for name, section in sections.items():
        rows = section[by].get(attribute) or []
        if [r["group"] for r in rows] != [g["group"] for g in groups]:
            continue  # a run that was evaluated without the attribute, or with other groups of it
        found = section["spearman"].get(attribute)
        follows = [f"{found['value']:+.2f}" if found else NONE] if ordered else []
        if not of_queries:
            row(table, [name_cell(name), " mean", *(number(r["mean"]) for r in rows), *follows])
        row(table, [name_cell(name) if of_queries else "", " d topk", *(effect(r["topk"]) for r in rows)])
    title = f"|{side}| by {_ATTRIBUTES.get(attribute, attribute)}" + (" that asks" if of_queries else "")
    return titled(title, None, pool, table)


def notes(runs: Mapping[str, Results], pool: str = MAIN_POOL) -> list[str]:
    """What the tables cannot say: numbers that do not exist and why, and queries whose numbers hang on ties."""
    said: dict[str, list[str]] = {}
    for name, run in runs.items():
        for side, section in run.pools[pool]["magnitude"].items():
            for kind in ("topk", "corpus", "pairs"):
                reason = section["cohens_d"].get(f"{kind}_reason")
                # Why relevance is balanced or complete is the same story in every pool: told once.
                if reason is not None and (kind == "topk" or pool == MAIN_POOL):
                    said.setdefault(f"|{side}| d {kind}: {printable(reason)}", []).append(name)
    ties = {
        direction.value: max(
            numbers["tied_queries"]
            for run in runs.values()
            for numbers in run.pools[pool]["retrieval"][direction.value].values()
        )
        for direction in CLIP_DIRECTIONS
    }
    first = next(iter(runs.values())).pools[pool]["retrieval"]
    for direction in CLIP_DIRECTIONS:
        too_few = first[direction.value][NATIVE].get("clamped_k", {})
        if too_few:
            n = next(iter(too_few.values()))
            said[f"{direction.value} has {n} candidates: {', '.join(too_few)} take all of them"] = list(runs)
    for direction in CLIP_DIRECTIONS:
        for name, run in runs.items():
            found = run.pools[pool]["retrieval"][direction.value].get(CORRECTED)
            if found:
                said.setdefault(f"{direction.value} {_bank(found)}", []).append(name)
    for direction in CLIP_DIRECTIONS:
        for name, run in runs.items():
            if n := few_clusters(run, pool, direction.value):
                said.setdefault(f"{direction.value}: {n} images ask; intervals over so few are too narrow", []).append(
                    name
                )
    if any(ties.values()):
        told = ", ".join(f"{n} {d}" for d, n in ties.items())
        said[f"tied queries, at most {told}: counted against the model"] = list(runs)
    return [
        note if len(names) == len(runs) else f"{note} ({', '.join(printable(n, NAME_WIDTH) for n in names)})"
        for note, names in said.items()
    ]


def few_clusters(run: Results, pool: str, direction: str) -> int:
    """How many images' queries ask, where they are fewer than ``FEW_CLUSTERS``, else 0."""
    n = len(np.unique(run.array(f"{pool}/{direction}/clusters")))
    return n if n < FEW_CLUSTERS else 0


def _bank(found: Json) -> str:
    own = ", the evaluation's own items, which a real search does not have" if found["transductive"] else ""
    same = f", {found['bank_overlap']} of which the evaluation has, too" if found.get("bank_overlap") else ""
    return f"corrected: bank {printable(found['bank'], 80)}, {found['bank_size']} items{own}{same}"


def print_run(results: Results, name: str | None = None, console: Console | None = None, groups: bool = False) -> None:
    """One run, every pool; with ``groups`` also lengths by caption length, level and object count."""
    console = console or make_console()
    runs = {name if name is not None else str(results.json.get("model")): results}
    for pool in results.pools:
        console.print(run_table(results, name, pool))
        console.print(backwards_table(runs, pool) or "", end="")
    _print_lengths(runs, console, groups)


def print_comparison(
    runs: Mapping[str, Results], verdicts: Iterable[Json] = (), console: Console | None = None
) -> None:
    """Several runs over the same data, the first being what the others are measured against; then the verdicts.

    Errors: UserError where the runs were not evaluated on the same data.
    """
    console = console or make_console()
    for pool in _shared_pools(runs):
        console.print(runs_table(runs, pool))
        console.print(backwards_table(runs, pool) or "", end="")
        console.print(seeds_table(runs, pool) or "", end="")
    console.print(Text("± half of the 95% interval; ~ within noise: the paired interval of the difference holds 0\n"))
    _print_lengths(runs, console, groups=True)
    for found in verdicts:
        print_verdict(found, console)


def print_verdict(verdict: Json, console: Console | None = None) -> None:
    """The two sentences of comparison.verdict."""
    console = console or make_console()
    for kind in ("learned", "useful"):
        answer = {True: "yes", False: "not shown", None: "open"}[verdict[kind]["verdict"]]
        place = f"{verdict['direction']}, pool {verdict['pool']}"
        console.print(Text(f"{kind}? {answer} ({printable(place)}): {printable(verdict[kind]['sentence'], 600)}"))


def _print_lengths(runs: Mapping[str, Results], console: Console, groups: bool) -> None:
    console.print(Text(_LEGEND, style="dim"))
    first = next(iter(runs.values()))
    for pool in _shared_pools(runs):
        console.print(lengths_table(runs, pool))
        said = notes(runs, pool)
        for note in said:
            console.print(Text(note, style="dim"))
        if said:
            console.print()
    for side, section in first.json["magnitude"].items() if groups else ():
        for attribute in section["by_document"]:
            console.print(groups_table(runs, side, attribute) or "")
        for attribute in section["by_query"]:
            console.print(groups_table(runs, side, attribute, of_queries=True) or "")


def _shared_pools(runs: Mapping[str, Results]) -> list[str]:
    first, *others = runs.values()
    return [pool for pool in first.pools if all(pool in run.pools for run in others)]
