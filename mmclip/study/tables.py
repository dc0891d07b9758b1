"""A study's tables that describe: what ran, the paper's Table 6, the frontier, scorings, γ, CV, data fractions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED, Results
from mmclip.reporting.table import is_number
from mmclip.roles import CLIP_DIRECTIONS, FIXED_NORMS, LOSS_WEIGHTS
from mmclip.study.arms import COSMETIC, MEASURING, Arm
from mmclip.study.numbers import (
    Scored,
    Spread,
    Study,
    curriculum,
    fraction,
    initial,
    permuted,
    served,
    spread,
)
from mmclip.study.sheets import Sheet, interval_columns, spread_columns

Json = dict[str, Any]
SIDES = ("image", "text")
DIRECTIONS = [d.value for d in CLIP_DIRECTIONS]
SCORINGS = (*FIXED_NORMS, NATIVE, REVERSED, CORRECTED)


class PaperRow(NamedTuple):
    """A row of Table 6 of Feng & Watanabe 2026, arXiv 2602.09229: CLIP from scratch on COCO. Cohen's d, whose reference
    set the paper does not fully specify, and R@1 in percent."""

    name: str
    loss: str
    norm: str
    d_image: float
    d_text: float
    cosine_i2t: float
    cosine_t2i: float
    dot_i2t: float
    dot_t2i: float


PAPER_TABLE6 = (
    PaperRow("Norm (Sym)", "sym", "cosine", -0.55, -0.30, 38.4, 28.0, 32.8, 26.3),
    PaperRow("NoNorm (Sym)", "sym", "dot", -0.65, -0.06, 23.4, 19.1, 25.1, 19.5),
    PaperRow("ImgNorm-I2T", "asym-i2t", "qnorm", 5.72, 1.83, 30.5, 0.3, 32.1, 0.3),
    PaperRow("NoNorm-I2T", "asym-i2t", "dot", -0.49, 0.58, 18.0, 12.4, 21.2, 9.6),
    PaperRow("TxtNorm-T2I", "asym-t2i", "qnorm", 2.11, 10.89, 1.9, 17.6, 0.2, 23.4),
    PaperRow("NoNorm-T2I", "asym-t2i", "dot", 1.31, 1.21, 8.6, 13.5, 6.9, 16.7),
)
OF_A_RUN = (*COSMETIC, *MEASURING, "seed", "init_from")  # differ within an arm, or do not make it what it is
TABLE6_RATES = [(scoring, direction) for scoring in ("cosine", "dot") for direction in DIRECTIONS]


def setting_columns(arm: Arm) -> Json:
    """What an arm is, by its settings."""
    return {
        "arm": arm.name,
        "loss": arm.settings.loss,
        "i2t_weight": arm.i2t_weight,
        "norm": arm.settings.norm,
        "curriculum": curriculum(arm),
        "train_fraction": fraction(arm),
        "permute_pairs": permuted(arm),
        "initial": initial(arm),
    }


def cells(study: Study) -> Sheet:
    """Every run."""
    rows = []
    for arm in study.arms:
        for seed, run in sorted(arm.runs.items()):
            lines = arm.logs.get(seed) or [{}]
            facts = run.json["trained_with"]
            row = setting_columns(arm) | {
                "seed": seed,
                "gamma_q": facts.get("gamma_q"),
                "gamma_d": facts.get("gamma_d"),
                "steps": lines[-1].get("step"),
                "seconds": arm.seconds.get(seed),
            }
            for direction in DIRECTIONS:
                for scoring in SCORINGS:
                    for k in (1, 5, 10):
                        found = study.rate(run, direction, scoring, f"success@{k}")
                        row[f"success@{k}_{scoring}_{direction}"] = found
            for side in SIDES:
                row[f"d_topk_{side}"] = effect(run, study.pool, side, "topk")
                row[f"d_corpus_{side}"], row[f"d_corpus_{side}_pool"] = _corpus(run, side)
                row[f"cv_{side}"] = coefficient(run, study.pool, side)
            for direction in DIRECTIONS:
                row[f"effective_scale_{direction}"] = facts.get(f"effective_scale_{direction}")
            for scoring in (NATIVE, "cosine"):
                row[f"zero_shot_acc1_{scoring}"] = zero_shot(run.json, scoring)
                row[f"zero_shot_before_acc1_{scoring}"] = zero_shot(arm.starts.get(seed) or {}, scoring)
            rows.append(row)
    return Sheet("cells", ("arm", "seed"), rows)


def effect(run: Results, pool: str, side: str, reference: str) -> float | None:
    """Cohen's d of a side's lengths, None where it does not exist."""
    found = run.pools[pool]["magnitude"][side]["cohens_d"].get(reference)
    return found["value"] if isinstance(found, dict) and is_number(found.get("value")) else None


def _corpus(run: Results, side: str) -> tuple[float | None, str | None]:
    """(d corpus, the pool that it is of): the first pool in which a document is relevant to nothing."""
    found = ((effect(run, pool, side, "corpus"), pool) for pool in run.pools)
    return next((pair for pair in found if pair[0] is not None), (None, None))


def coefficient(run: Results, pool: str, side: str) -> float | None:
    value = run.pools[pool]["magnitude"][side].get("cv")
    return value if is_number(value) else None


def zero_shot(document: Json, scoring: str) -> float | None:
    """acc1 of results.json or start.json, None where it was not measured."""
    section = document.get("zero_shot")
    accuracy = section.get("acc1") if isinstance(section, dict) else None
    value = accuracy.get(scoring) if isinstance(accuracy, dict) else None
    return value if is_number(value) else None


def over(arm: Arm, number: Callable[[Results], float | None]) -> Spread:
    return spread(number(run) for run in arm.runs.values())


def table6(study: Study) -> Sheet:
    """The paper's layout: its six configurations first, then every other arm; its own numbers beside them, rates as
    fractions. d is that of the reference set topk."""
    rows, placed = [], set()
    for paper in PAPER_TABLE6:
        weight = LOSS_WEIGHTS[paper.loss]
        found = [a for a in study.arms if study.is_plain(a) and (a.i2t_weight, a.settings.norm) == (weight, paper.norm)]
        placed |= {id(arm) for arm in found}
        rows += [_table6_row(study, arm, paper) for arm in found]
        if not found:
            rows.append(_table6_row(study, None, paper))
    rows += [_table6_row(study, arm, None) for arm in study.arms if id(arm) not in placed]
    return Sheet("table6", ("paper_config", "loss", "norm", "arm", "n_seeds"), rows)


def _table6_row(study: Study, arm: Arm | None, paper: PaperRow | None) -> Json:
    row: Json = {
        "paper_config": paper and paper.name,
        "loss": arm.settings.loss if arm else paper and paper.loss,
        "norm": arm.settings.norm if arm else paper and paper.norm,
        "arm": arm and arm.name,
        "n_seeds": len(arm.runs) if arm else 0,
    }
    for side in SIDES:
        name = f"d_topk_{side}"
        row |= spread_columns(name, _spread(arm, lambda run, s=side: effect(run, study.pool, s, "topk")))  # type: ignore[misc]
        row[f"paper_d_{side}"] = paper and getattr(paper, f"d_{side}")
    for scoring, direction in TABLE6_RATES:
        found = study.spread(Scored(arm, direction, scoring)) if arm else spread([])
        row |= spread_columns(f"success@1_{scoring}_{direction}", found)
        row[f"paper_R@1_{scoring}_{direction}"] = paper and getattr(paper, f"{scoring}_{direction}") / 100
    row["reason"] = "" if arm else "no arm of this study"
    return row


def _spread(arm: Arm | None, number: Callable[[Results], float | None]) -> Spread:
    return over(arm, number) if arm else spread([])


def frontier(study: Study) -> Sheet:
    """A row an arm and point: native in both directions; and corrected where the direction was not trained, or in both
    directions of an arm that trained both."""
    rows = []
    for number, arm in enumerate(study.arms, 1):
        both = all(arm.trains(d) for d in DIRECTIONS)
        for point in (NATIVE, CORRECTED):
            row: Json = {"number": number} | setting_columns(arm) | {"point": point, "n_seeds": len(arm.runs)}
            for direction in DIRECTIONS:
                scoring = point if both or point == NATIVE else served(arm, direction)
                scored = Scored(arm, direction, scoring)
                row[f"{direction}_scoring"] = scoring
                row |= spread_columns(direction, study.spread(scored))
                row |= interval_columns(direction, study.mean(scored))
            rows.append(row)
    return Sheet("frontier", ("number", "arm", "point"), rows)


def matrix(study: Study) -> Sheet:
    """Trained with, down; scored with, across; success@1."""
    rows = []
    for arm in study.arms:
        for direction in DIRECTIONS:
            row = {"arm": arm.name, "direction": direction, "trained": arm.trains(direction), "n_seeds": len(arm.runs)}
            for scoring in SCORINGS:
                row |= spread_columns(scoring, study.spread(Scored(arm, direction, scoring)))
            rows.append(row)
    return Sheet("matrix", ("arm", "direction", "trained", "n_seeds"), rows)


def gammas(study: Study) -> Sheet:
    """γ at every logged step of the arms in which it moves."""
    rows = []
    for arm in study.arms:
        for seed, lines in sorted(arm.logs.items()):
            told = [line for line in lines if is_number(line.get("gamma_q")) and is_number(line.get("gamma_d"))]
            if len({(line["gamma_q"], line["gamma_d"]) for line in told}) > 1:
                rows += [
                    {"arm": arm.name, "seed": seed} | {k: line[k] for k in ("step", "gamma_q", "gamma_d")}
                    for line in told
                ]
    return Sheet("gamma", ("arm", "seed", "step", "gamma_q", "gamma_d"), rows)


def cv(study: Study) -> Sheet:
    """CV of either side's lengths."""
    rows = []
    for arm in study.arms:
        row = setting_columns(arm) | {"n_seeds": len(arm.runs)}
        for side in SIDES:
            row |= spread_columns(f"cv_{side}", over(arm, lambda run, s=side: coefficient(run, study.pool, s)))  # type: ignore[misc]
        rows.append(row)
    return Sheet("cv", ("arm",), rows)


def delta_cv(study: Study) -> Sheet:
    """The paper's ΔCV = CV(dnorm-trained) / CV(dot-trained) on the query's side, seed by seed, wherever both exist."""
    rows = []
    for dnorm in (arm for arm in study.arms if arm.settings.norm == "dnorm"):
        for dot in alike(dnorm, study.arms, "dot"):
            for direction in (d for d in CLIP_DIRECTIONS if dnorm.trains(d.value)):
                side = direction.query_side
                pairs = [
                    [coefficient(a.runs[s], study.pool, side) for a in (dnorm, dot)] for s in dnorm.seeds_with(dot)
                ]
                found = spread(a / b for a, b in pairs if a is not None and b)
                rows.append(
                    {"i2t_weight": dnorm.i2t_weight, "direction": direction.value, "query_side": side}
                    | {"dnorm_arm": dnorm.name, "dot_arm": dot.name, "n_seeds": found.n}
                    | spread_columns("delta_cv", found)
                )
    return Sheet("delta_cv", ("i2t_weight", "direction", "query_side", "dnorm_arm", "dot_arm", "n_seeds"), rows)


def alike(arm: Arm, arms: Iterable[Arm], norm: str) -> list[Arm]:
    """The arms with another normalization and all else the same, but their names and seeds."""
    return [other for other in arms if other.settings.norm == norm and _kind(other, "norm") == _kind(arm, "norm")]


def _kind(arm: Arm, *without: str) -> Json:
    """The settings that make an arm what it is; lambda stands for the loss."""
    found = arm.settings.to_dict() | {"initial": initial(arm), "lambda": arm.i2t_weight}
    return {k: v for k, v in found.items() if k not in (*OF_A_RUN, "loss", "i2t_weight", *without)}


def fractions(study: Study) -> Sheet:
    """success@1 by the share of the training data, for settings that were trained on several."""
    rows = []
    groups: dict[str, list[Arm]] = {}
    for arm in study.arms:
        groups.setdefault(repr(_kind(arm, "train_fraction")), []).append(arm)
    for members in groups.values():
        if len({fraction(arm) for arm in members}) < 2:
            continue
        for arm in sorted(members, key=fraction):
            for direction in DIRECTIONS:
                for scoring in (NATIVE, CORRECTED):
                    scored = Scored(arm, direction, scoring)
                    row: Json = {"setting": max(members, key=fraction).name} | setting_columns(arm)
                    row |= {"direction": direction, "scoring": scoring, "n_seeds": len(arm.runs)}
                    rows.append(row | spread_columns("success@1", study.spread(scored)))
                    rows[-1] |= interval_columns("success@1", study.mean(scored))
    return Sheet("fractions", ("setting", "arm", "train_fraction", "direction", "scoring", "n_seeds"), rows)
