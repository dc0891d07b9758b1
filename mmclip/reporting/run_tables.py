"""Tables of one run or of several over the same data, for terminal and page alike.

Runs come as name -> results, the first being the one that others are compared with. R@k is success@k: a relevant
document among the best k. Where a query has one relevant document that is its recall; "share of relevant" is recall.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmclip.errors import printable
from mmclip.evaluation.comparison import compare, group_by_seed, scoring_gain, significance
from mmclip.evaluation.diagnostics import MEASURES, alpha_note, value_at
from mmclip.evaluation.eval_set import MAIN_POOL
from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Results
from mmclip.reporting.table import Cell, Table, change_cell, is_number, number, rate, rate_cell, text_cell, value_cell
from mmclip.similarity import Direction

Json = dict[str, Any]
Runs = Mapping[str, Results]
HEADS = {"success@1": "R@1", "success@5": "R@5", "success@10": "R@10", "mrr@10": "MRR@10", "ndcg@10": "nDCG@10",
         "map": "MAP", "recall@5": "share of\nrelevant@5"}  # fmt: skip
TEXT_HEADS = {"ndcg@10": "nDCG@10", "recall@100": "share of\nrelevant@100", "mrr@10": "MRR@10", "success@1": "R@1"}
LONG = {"i2t": "image → text", "t2i": "text → image", "q2d": "query → document"}
ORDER = (NATIVE, "cosine", CORRECTED, REVERSED)  # of scorings; the others follow as they come
FEW_CLUSTERS = 20  # a percentile bootstrap over fewer covers visibly less than it promises
_ATTRIBUTES = {"n_words": "words in the caption", "n_objects": "objects in the picture", "level": "caption level"}
_D = (
    "d: Cohen's d of document norms, relevant less irrelevant, in standard deviations. Top 10: among each query's 10 "
    "best by cosine; corpus: documents relevant to some query against documents relevant to none; pairs: all relevant "
    "pairs against all others. Its null is a control run, whose documents were normalized in training, and not 0. CV: "
    "standard deviation over mean."
)
_R = "R@k: share of queries with a relevant document among the best k (success@k; CLIP papers' recall@k)."
_NOISE = "~ within noise: the paired 95% interval of the difference holds 0."


def run_tables(runs: Runs, groups: bool = False) -> list[Table]:
    """Every table of runs over the same data; ``groups``: also norms by attributes of the items.

    Errors: UserError where the runs were not evaluated on the same data.
    """
    pools, first = shared_pools(runs), next(iter(runs.values())).json["magnitude"]
    tables = [retrieval_table(runs, pool, d) for pool in pools for d in directions(runs)]
    tables += [norms_table(runs, pool) for pool in pools]
    attributes = [
        (side, by, a) for side in first for by in ("by_document", "by_query") for a in first[side].get(by) or {}
    ]
    grouped = (groups_table(runs, side, a, by) for side, by, a in attributes if groups)
    return tables + [table for table in grouped if table is not None]


def comparison_tables(runs: Runs) -> list[Table]:
    """The runs side by side in every pool with differences to the first, and means over seeds.

    Errors: UserError where the runs were not evaluated on the same data.
    """
    changes = differences(runs)
    tables = []
    for pool in shared_pools(runs):
        tables += [overview(runs, pool, changes), seeds_table(runs, pool)]
    return [table for table in tables if table is not None]


def differences(runs: Runs) -> dict[str, Json]:
    """Name -> :func:`compare` of a run with the first; of text with p and detectable effect."""
    (_, first), *others = runs.items()
    changes = {name: compare(first, run) for name, run in others}
    if others and directions(runs) == ["q2d"]:
        for name, tested in significance(runs).items():
            changes[name][MAIN_POOL]["q2d"][NATIVE]["ndcg@10"] = tested
    return changes


def directions(runs: Runs) -> list[str]:
    """Directions of the first run, as results.json names them."""
    return list(next(iter(runs.values())).json["retrieval"])


def shared_pools(runs: Runs) -> list[str]:
    first, *others = (run.pools for run in runs.values())
    return [pool for pool in first if all(pool in other for other in others)]


def main_metric(direction: str) -> str:
    """The metric that verdicts are about."""
    return "ndcg@10" if direction == "q2d" else "success@1"


def metric_heads(direction: str) -> dict[str, str]:
    """Metric -> its head, of those that are shown in a direction."""
    return TEXT_HEADS if direction == "q2d" else HEADS


def metric_cell(numbers: Json | None, metric: str, bar: bool = False) -> Cell:
    """A metric with its interval, of a scoring in results.json; none where it does not exist."""
    numbers = numbers or {}
    return rate_cell(numbers.get(metric), (numbers.get("ci") or {}).get(metric), bar)


def overview(runs: Runs, pool: str = MAIN_POOL, changes: Mapping[str, Json] | None = None) -> Table:
    """The main metric of every run by its main scorings, beside its difference to the first run.

    Bars have one scale, from 0 to the tenth above the largest end of an interval.
    """
    changes = differences(runs) if changes is None else changes
    columns, rows = ["run, scoring"], []
    for d in directions(runs):
        columns += [f"{LONG[d]}\n{metric_heads(d)[main_metric(d)]}"]
        columns += ["less\nthe first"] if changes else []
        columns += ["p\n(Holm)", "detectable"] if changes and d == "q2d" else []
    for name, run in runs.items():
        retrieval = run.pools[pool]["retrieval"]
        for scoring in [s for s in ORDER[:3] if any(s in retrieval[d] for d in retrieval)]:
            cells = []
            for d, section in retrieval.items():
                cells.append(metric_cell(section.get(scoring), main_metric(d), bar=True))
                if changes:
                    change = value_at(changes.get(name), [pool, d, scoring, main_metric(d)])[0]
                    cells += _tested(change)[: 3 if d == "q2d" else 1]
            rows.append((f"{name}\n{scoring}", cells))
    barred = [(cell, cell.bar) for _, cells in rows for cell in cells if cell.bar]
    end = max((bar[2] for _, bar in barred), default=1.0)
    end = max(np.ceil(end * 10 - 1e-9), 1) / 10  # rates of .08 and .2 would look alike on a line up to 1
    for cell, (low, value, high) in barred:
        cell.bar = (low / end, value / end, high / end)
    notes = [note for note in (_NOISE if changes else None, encoded_unlike(runs)) if note is not None]
    for d in directions(runs):
        n = len(np.unique(next(iter(runs.values())).clusters(pool, d)))
        words = f"{LONG[d]}: queries of {n} clusters only; intervals over fewer than {FEW_CLUSTERS} are too narrow."
        notes += [words] if n < FEW_CLUSTERS else []
    return Table(f"at a glance · {place(runs, pool)}", columns, rows, notes)


def retrieval_table(runs: Runs, pool: str, direction: str) -> Table:
    """Every metric in one direction, run by run; scorings with the same numbers share a row."""
    heads, rows = metric_heads(direction), list[tuple[str, list[Cell]]]()
    notes: dict[str, list[str]] = {}
    for name, run in runs.items():
        section = run.pools[pool]["retrieval"][direction]
        rows += [(name, [])] if len(runs) > 1 else []
        for names in _alike(section):
            numbers = section[names[0]]
            median = numbers.get("median_rank")
            cells = [*(metric_cell(numbers, m) for m in heads), text_cell(float(median) if is_number(median) else None)]
            rows.append((" = ".join(names), cells))
        for note in _retrieval_notes(run, pool, direction):
            notes.setdefault(note, []).append(name)
    once = pool == MAIN_POOL and direction == directions(runs)[0]
    title = f"{LONG[direction]} · {place(runs, pool)}"
    return Table(title, ["scoring", *heads.values(), "median\nrank"], rows, [_R] * once + _shared(notes, runs))


def change_table(runs: Runs, pool: str, direction: str, changes: Mapping[str, Json]) -> Table:
    """Every run less the first, paired, in one direction."""
    heads, first, rows = metric_heads(direction), next(iter(runs)), list[tuple[str, list[Cell]]]()
    for name, change in changes.items():
        section = change[pool][direction]
        rows.append((f"{name} less {first}", []))
        rows += [(" = ".join(names), [change_cell(section[names[0]][m]) for m in heads]) for names in _alike(section)]
    return Table(f"{LONG[direction]}: less {first}, pool {pool}", ["scoring", *heads.values()], rows, [_NOISE])


def _retrieval_notes(run: Results, pool: str, direction: str) -> Iterable[str]:
    section = run.pools[pool]["retrieval"][direction]
    if few := section[NATIVE].get("clamped_k"):
        yield f"{next(iter(few.values()))} candidates: {', '.join(few)} take all of them"
    if ties := max(numbers.get("tied_queries", 0) for numbers in section.values()):
        yield f"tied queries, at most {ties}: counted against the model"
    bank = section.get(CORRECTED)
    if isinstance(bank, dict):
        alpha = f", α {number(bank['alpha'])}" if is_number(bank.get("alpha")) else ""
        size = text_cell(bank.get("bank_size")).text
        words = f"corrected: bank {printable(bank.get('bank'), 80)}, {size} items{alpha}"
        words += f", {bank['bank_overlap']} of them in the evaluation, too" if bank.get("bank_overlap") else ""
        if bank.get("transductive"):
            words += "; transductive: the evaluation's own items, which a search engine would not have"
        if REVERSED in section:
            gain = change_cell(scoring_gain(run, pool, direction, REVERSED, CORRECTED))
            words += f"; less reversed {'~' if gain.kind == 'noise' else ''}{gain.text} ({gain.detail})"
        yield words


def seeds_table(runs: Runs, pool: str) -> Table | None:
    """R@1 of runs that differ in their seed only, in every direction; None without such runs."""
    groups = group_by_seed(runs)
    if not groups:
        return None
    rows: list[tuple[str, list[Cell]]] = []
    for group in groups:
        members = {id(results) for results in group.runs}
        rows.append((f"{group.name}: {', '.join(name for name, run in runs.items() if id(run) in members)}", []))
        for d in directions(runs):
            (native, *others), gains = group.row(pool, d, groups[0])
            cells = [rate_cell(m["mean"], m["ci"]) if m else text_cell(None) for m in (native, *others)]
            cells.insert(1, Cell(f"{rate(native['low'])}–{rate(native['high'])}") if native else text_cell(None))
            rows.append((LONG[d], [Cell(str(len(group.runs))), *cells, *map(change_cell, gains)]))
    columns = ["mean of seeds", "runs", "native", "lowest–\nhighest", REVERSED, CORRECTED, "corrected\nless reversed"]
    columns += ["native less\nthe first's", "corrected less\nthe first's native"]
    note = "Intervals cover the choice of queries and not that of seeds; lowest–highest is the range of the seeds."
    return Table(f"R@1 over seeds · {place(runs, pool)}", columns, rows, [note, _NOISE])


def norms_table(runs: Runs, pool: str) -> Table:
    """Mean norm and CV of each side of every run, and Cohen's d by reference set of documents."""
    ranked = {Direction(d).document_side: d for d in directions(runs)}
    rows, notes = [], dict[str, list[str]]()
    for name, run in runs.items():
        for side, section in run.pools[pool]["magnitude"].items():
            cells = [value_cell(section.get("mean")), rate_cell(section.get("cv"))]
            for kind in ("topk", "corpus", "pairs"):
                cells.append(value_cell(section.get("cohens_d", {}).get(kind), effect=True))
                if side in ranked and (reason := section["cohens_d"].get(f"{kind}_reason")) is not None:
                    notes.setdefault(f"no d ({kind}) of {side}s: {printable(reason)}", []).append(name)
            rows.append((f"{name}\n{side}s" + (f", ranked in {LONG[ranked[side]]}" if side in ranked else ""), cells))
    columns = ["run", "mean\nnorm", "CV", "d\ntop 10", "d\ncorpus", "d\npairs"]
    shown = [_D] * (pool == MAIN_POOL) + _shared(notes, runs)
    return Table(f"embedding norms · {place(runs, pool)}", columns, rows, shown)


def groups_table(runs: Runs, side: str, attribute: str, by: str = "by_document", pool: str = MAIN_POOL) -> Table | None:
    """Mean norm and d (top 10) of a side's documents by an attribute of theirs, or of queries.

    None where the data does not have the attribute.
    """
    sections = {name: run.pools[pool]["magnitude"][side] for name, run in runs.items()}
    groups = next(iter(sections.values()))[by].get(attribute)
    if not groups:
        return None
    whole = by == "by_document"
    heads = [printable(group["group"], 22) for group in groups] + ["rank\ncorrelation"] * whole
    rows = [("n", [Cell(str(group["n"]), value=group["n"]) for group in groups] + [text_cell(None)] * whole)]
    for name, section in sections.items():
        values = section[by].get(attribute) or []
        if [v["group"] for v in values] != [g["group"] for g in groups]:
            continue  # a run that was evaluated without the attribute, or with other groups of it
        effects = [value_cell(v["topk"], effect=True) for v in values]
        if whole:
            correlation = value_cell(section["spearman"].get(attribute), effect=True)
            rows.append((f"{name}, mean norm", [*(value_cell(v["mean"]) for v in values), correlation]))
        rows.append((f"{name}, d top 10", effects + [text_cell(None)] * whole))
    title = f"{side} norm by {_ATTRIBUTES.get(attribute, attribute)}" + ("" if whole else " of the query")
    return Table(f"{title} · {place(runs, pool)}", ["run", *heads], rows)


def diagnostics_tables(runs: Runs, pool: str = MAIN_POOL) -> tuple[Table, Table] | None:
    """(the measures to look at first with what they say, all by their names in results.json); None without any."""
    sections = {
        (f"{name}\n{d}" if len(runs) > 1 else d if d == "q2d" else f"{d}\n{Direction(d).query_side} queries"): section
        for name, run in runs.items()
        for d in run.pools[pool]["retrieval"]
        if isinstance(section := (run.pools[pool].get("diagnostics") or {}).get(d), dict)
    }
    if not sections:
        return None
    reasons: dict[str, dict[str, list[str]]] = {}
    rows = []
    for path, label, about in MEASURES:
        cells = []
        for head, section in sections.items():
            value, reason = value_at(section, path.split())
            cells.append(value_cell(value))
            if reason:
                reasons.setdefault(printable(reason, 200), {}).setdefault(label, []).append(head.replace("\n", " "))
        if any(cell.kind != "none" for cell in cells):
            rows.append((f"{label}\n{about}", cells))
    notes = []
    for reason, labels in reasons.items():
        where = (label + (f" ({', '.join(at)})" if len(at) < len(sections) else "") for label, at in labels.items())
        notes.append(f"does not exist: {', '.join(where)}: {reason}")
    alpha = alpha_note({head.replace("\n", " "): section for head, section in sections.items()})
    notes += [] if alpha is None else [alpha]
    flat = {head: _flat(section) for head, section in sections.items()}
    names = list(dict.fromkeys(name for values in flat.values() for name in values))
    every = [(name, [flat[head].get(name, text_cell(None)) for head in sections]) for name in names]
    title = f"diagnostics · {place(runs, pool)}"
    return Table(title, ["measure", *sections], rows, notes), Table(f"all {title}", ["name", *sections], every)


def _flat(section: Json, prefix: str = "") -> dict[str, Cell]:
    """Every value by the names that lead to it; a value with an interval is one."""
    cells: dict[str, Cell] = {}
    for key, value in section.items():
        name = printable(f"{prefix}{key}", 120)
        if isinstance(value, dict) and "ci" not in value:
            cells |= _flat(value, f"{name} · ")
        elif value is not None:
            cells[name] = text_cell(value, 160) if isinstance(value, str) else value_cell(value)
    return cells


def settings_tables(runs: Runs, settings: Mapping[str, Json | None]) -> tuple[Table, Table]:
    """(settings that differ, all the others) of runs, of config.yaml and results.json."""
    cells = {name: _settings(run.json, settings.get(name)) for name, run in runs.items()}
    names = list(dict.fromkeys(name for one in cells.values() for name in one))
    rows = {name: [one.get(name, text_cell(None)) for one in cells.values()] for name in names}
    differ = {name: row for name, row in rows.items() if len({cell.text for cell in row}) > 1}
    same = {name: row for name, row in rows.items() if name not in differ}
    heads = ["setting", *runs]
    return (
        Table("settings that differ between the runs", heads, list(differ.items())),
        Table("settings and versions", heads, list(same.items())),
    )


def _settings(results: Json, settings: Json | None) -> dict[str, Cell]:
    cells = {printable(k, 80): text_cell(repr(v) if v in ("", "\t") else v, 200) for k, v in (settings or {}).items()}
    for head in ("trained_with", "data", "evaluation", "versions"):
        for name, cell in _flat(results.get(head) or {}, f"{head} · ").items():
            cells[name] = text_cell(cell.value, 200) if cell.value is not None else cell
    return cells | {k: text_cell(results[k], 200) for k in ("model", "seed") if k in results}


def files_table(rates: Mapping[str, Mapping[str, Sequence[float]]], paired: Sequence[Json | None]) -> Table:
    """TREC run files: name -> metric -> (mean, low, high), and each one's nDCG@10 over the first's (or None)."""
    rows = []
    for (name, values), change in zip(rates.items(), paired, strict=True):
        cells = [rate_cell(values[m][0], values[m][1:]) for m in TEXT_HEADS]
        rows.append((name, [cells[0], *_tested(change), *cells[1:]]))
    first, *others = TEXT_HEADS.values()
    columns = ["run", first, "less\nthe first", "p\n(Holm)", "detectable", *others]
    return Table("TREC run files", columns, rows, [_NOISE])


def _tested(change: Json | None) -> list[Cell]:
    """Difference, p and smallest detectable effect of metrics.significance."""
    tested = change or {}
    p = tested.get("p_holm", tested.get("p"))
    p_cell = text_cell(None) if p is None else Cell(f"{p:.4f}", value=p)
    return [change_cell(change), p_cell, rate_cell(tested.get("smallest_detectable"))]


def verdict_lines(verdicts: Iterable[Json]) -> list[str]:
    """The two sentences of every comparison.verdict: were norms learned, are they useful?"""
    answers, lines = {True: "yes", False: "not shown", None: "open"}, []
    for verdict in verdicts:
        where = f"{verdict['direction']}, pool {printable(verdict['pool'])}"
        for kind in ("learned", "useful"):
            answer, sentence = answers[verdict[kind]["verdict"]], printable(verdict[kind]["sentence"], 600)
            lines.append(f"norms {kind}? {answer} ({where}): {sentence}")
    return lines


def encoded_unlike(runs: Runs) -> str | None:
    """How text runs cut or prompt the same texts differently; None where they do not."""
    how = {}
    for name, run in runs.items():
        tokens, prompts = run.json.get("lengths") or {}, run.json.get("prompts") or {}
        how[name] = ", ".join(
            f"{role} {tokens.get(role, 'unknown')} tokens" + (f" after {prompts[role]!r}" if prompts.get(role) else "")
            for role in ("query", "document")
        )
    if len(set(how.values())) < 2:
        return None
    unlike = "; ".join(f"{printable(name, 40)}: {printable(words, 120)}" for name, words in how.items())
    return f"not encoded alike, which is part of the differences: {unlike}"


def _alike(section: Json) -> list[list[str]]:
    """Scorings grouped by equal numbers, native first: four normalizations are two rankings."""
    groups: dict[str, list[str]] = {}
    for scoring in sorted(section, key=lambda s: ORDER.index(s) if s in ORDER else len(ORDER)):
        groups.setdefault(json.dumps(section[scoring], sort_keys=True), []).append(scoring)
    return list(groups.values())


def _shared(notes: Mapping[str, list[str]], runs: Runs) -> list[str]:
    """Notes, each with the names of the runs that it is about where it is not about all."""
    names = {text: ", ".join(printable(name, 40) for name in about) for text, about in notes.items()}
    return [text if len(notes[text]) == len(runs) else f"{text} ({names[text]})" for text in notes]


def place(runs: Runs, pool: str) -> str:
    """Pool, candidates and queries in words."""
    results = next(iter(runs.values()))
    about = results.json["data"] if pool == MAIN_POOL else results.json["pools"][pool]
    sides = ("documents",) if "n_documents" in about else ("images", "texts")
    counts = {side: about[f"n_{side}"] for side in sides}
    held = ", ".join(f"{n:,} {side}" if is_number(n) else f"{n} {side}" for side, n in counts.items())
    queries = ", ".join(f"{n} {d}" for d, n in about["n_queries"].items())
    return printable(f"pool {printable(pool, 40)}: {held}; queries {queries}", 200)
