"""The paper's claims about CLIP, and three questions beyond it, answered by rule from a study's arms.

docs/study.md states each claim with its statistic, its control and the rule; the names (T1, B1, ...) are its.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmclip.evaluation.results import CORRECTED, NATIVE, REVERSED
from mmclip.reporting.table import is_number
from mmclip.roles import LOSS_WEIGHTS
from mmclip.study.arms import Arm
from mmclip.study.judgements import fisher, kappa_verdicts, keeps_both, verdicts
from mmclip.study.numbers import Estimate, Scored, Study, initial, permuted, trained
from mmclip.study.sheets import Sheet, estimate_columns
from mmclip.study.tables import PAPER_TABLE6

Json = dict[str, Any]
REPRODUCED, NOT, UNDERPOWERED, MISSING = "reproduced", "not reproduced", "underpowered", "not asked here"
POWER = 1.43  # (1.96 + 0.84) / 1.96: the effect that a 5% test finds in 80% of cases, in halves of an interval
SMALL_D = 0.2  # Cohen's "small"
DEAD = 0.1  # share of sym/cosine's success@1 below which a direction is called dead
UNMOVED = 0.01
LITTLE = 0.05  # share of sym/cosine's success@1 that would be a benefit
PAPER = {(row.loss, row.norm): row for row in PAPER_TABLE6}
ONE_WAY = (("asym-i2t", "i2t", "t2i"), ("asym-t2i", "t2i", "i2t"))  # loss, trained direction, the other


def claims(study: Study) -> Sheet:
    """A row a claim and direction, "not asked here" where the study has no arms for it."""
    rows = [*_table6(study), *_lengths(study), *_gammas(study), *_benefit(study), *_kappa(study), *_start(study)]
    rows += [*_repaid(study), *sorted(_both(study), key=lambda r: -r["value"]), *_nulls(study)]
    return Sheet("claims", ("claim", "statement", "direction", "verdict", "value", "value_lo", "value_hi"), rows)


def judged(found: Estimate, paper: float, below: bool) -> str:
    """The verdict on a ratio that the paper has on one side of 1: below it, or above."""
    if found.lo is None or found.hi is None:
        return MISSING if found.value is None else UNDERPOWERED
    if found.hi < 1 if below else found.lo > 1:
        return REPRODUCED
    return UNDERPOWERED if found.lo <= paper <= found.hi else NOT


def _row(claim: str, statement: str, direction: str, verdict: str, found: Estimate, **more: Any) -> Json:
    smallest = None if found.lo is None or found.hi is None else POWER * (found.hi - found.lo) / 2
    row = {"claim": claim, "statement": statement, "direction": direction, "verdict": verdict}
    row |= estimate_columns("value", found) | {"n_seeds": found.n_seeds, "smallest_effect": smallest}
    return row | {"paper": None} | more | {"reason": found.reason}


def plain_arm(study: Study, loss: str, norm: str) -> Arm | None:
    """The arm of a loss (lambda of its name) and norm that is trained as the model begins, without more settings."""
    found = [
        a for a in study.arms if study.is_plain(a) and a.settings.norm == norm and a.i2t_weight == LOSS_WEIGHTS[loss]
    ]
    return found[0] if found else None


def _table6(study: Study) -> Iterator[Json]:
    """T1 to T7: ratios of success@1, as Table 6 has them."""

    def ratio(
        claim: str, statement: str, of: tuple[str, str, str], to: tuple[str, str, str], d: str, below: bool
    ) -> Json:
        paper = _paper(of, d) / _paper(to, d)
        arms = [plain_arm(study, loss, norm) for loss, norm, _ in (of, to)]
        if arms[0] is None or arms[1] is None:
            return _row(claim, statement, d, MISSING, Estimate.missing("the study has no such arms"), paper=paper)
        found = study.ratio(Scored(arms[0], d, of[2]), Scored(arms[1], d, to[2]))
        return _row(claim, statement, d, judged(found, paper, below), found, paper=paper)

    for d in ("i2t", "t2i"):
        yield ratio("T1", "raw dot scores harm symmetric training: sym/dot over sym/cosine",
                    ("sym", "dot", "dot"), ("sym", "cosine", "cosine"), d, True)  # fmt: skip
        yield ratio("T2", "a model trained by cosine loses when dot products rank: sym/cosine, dot over cosine",
                    ("sym", "cosine", "dot"), ("sym", "cosine", "cosine"), d, True)  # fmt: skip
    for loss, d, other in ONE_WAY:
        for claim, norm in (("T3", "qnorm"), ("T4", "dot")):
            yield ratio(claim, f"length helps the trained direction: {loss}/{norm}, dot over cosine",
                        (loss, norm, "dot"), (loss, norm, "cosine"), d, False)  # fmt: skip
        yield ratio("T5", f"normalizing the query beats normalizing nothing: {loss}/qnorm over {loss}/dot",
                    (loss, "qnorm", "dot"), (loss, "dot", "dot"), d, False)  # fmt: skip
        yield ratio("T6", f"below sym/cosine in its own direction: {loss}/qnorm over sym/cosine",
                    (loss, "qnorm", "dot"), ("sym", "cosine", "cosine"), d, True)  # fmt: skip
        pays = ratio("T7", f"the other direction pays: {loss}/qnorm over sym/cosine",
                     (loss, "qnorm", "dot"), ("sym", "cosine", "cosine"), other, True)  # fmt: skip
        yield pays
        lo, hi = pays["value_lo"], pays["value_hi"]
        dies = MISSING if hi is None else REPRODUCED if hi < DEAD else NOT if lo >= DEAD else UNDERPOWERED
        yield pays | {
            "claim": "T7b",
            "statement": f"it dies (below {DEAD}): {loss}/qnorm over sym/cosine",
            "verdict": dies,
        }


def _paper(of: tuple[str, str, str], direction: str) -> float:
    return float(getattr(PAPER[of[:2]], f"{of[2]}_{direction}"))


def _lengths(study: Study) -> Iterator[Json]:
    """T8: the documents' length, against the control's."""
    for loss, d, _ in ONE_WAY:
        arm = plain_arm(study, loss, "qnorm")
        learned = (study.verdict(arm, d).get("learned") or {}) if arm else {}
        lo, hi = learned.get("ci") or (None, None)
        reason = "" if lo is not None else learned.get("reason", "no arm with a control")
        found = Estimate(learned.get("delta"), lo, hi, len(arm.runs) if arm else 0, reason)
        verdict = (
            MISSING if lo is None or hi is None else REPRODUCED if lo > 0 else NOT if hi < SMALL_D else UNDERPOWERED
        )
        paper = PAPER[loss, "qnorm"].d_text if d == "i2t" else PAPER[loss, "qnorm"].d_image
        statement = f"documents' length separates relevant from irrelevant: d(topk) of {loss}/qnorm minus the control's"
        more = {"paper": paper, "arm_d": learned.get("d_run"), "control_d": learned.get("d_control")}
        yield _row("T8", statement, d, verdict, found, **more)


def _gammas(study: Study) -> Iterator[Json]:
    """T9: learned exponents at the end, at the encoders' learning rate and at one of their own."""
    for arm in study.arms:
        plain = study.is_plain(arm) and arm.i2t_weight == 0.5
        if arm.settings.norm != "learned" or not plain or not arm.settings.gamma_lr:
            continue
        ends = [run.json["trained_with"] for run in arm.runs.values()]
        off = [max(abs(float(e[k]) - 0.5) for k in ("gamma_q", "gamma_d")) for e in ends]
        slow = arm.settings.gamma_lr == arm.settings.lr
        verdict = (REPRODUCED if max(off) <= UNMOVED else NOT) if slow else "control"
        rate = "the encoders' rate" if slow else f"a rate of {arm.settings.gamma_lr:g}"
        found = Estimate(max(off), None, None, len(off))
        yield _row("T9", f"learned exponents stay near 1/2 at {rate}: largest distance", "both", verdict, found,
                   paper=0.002, arm=arm.name)  # fmt: skip


def _benefit(study: Study) -> Iterator[Json]:
    """T10: whether any arm is useful. That none is shown to be is no evidence where one could be by a twentieth of
    sym/cosine's success@1: every interval must end below that."""
    rows = [r for r in verdicts(study).rows if not r["null"] and r["useful"]]
    told = [r["useful"] for r in rows]
    small = all(_gains_little(study, row) for row in rows)
    verdict = MISSING if not told else NOT if "yes" in told else REPRODUCED if small else UNDERPOWERED
    names = [f"{r['arm']} {r['direction']}" for r in rows if r["useful"] == "yes"]
    counts = ", ".join(f"{told.count(w)} {w}" for w in ("yes", "open", "not shown"))
    yield _row("T10", "magnitude is not useful in any arm and trained direction", "both", verdict,
               Estimate(float(told.count("yes")), None, None, 0), counts=counts, useful=", ".join(names))  # fmt: skip


def _gains_little(study: Study, row: Json) -> bool:
    """Whether native less sym/cosine's cosine ends below LITTLE of the latter."""
    baseline = next((a for a in study.arms if a.name == row["baseline"]), None)
    high = row["native_minus_baseline_cosine_hi"]
    if baseline is None or high is None:
        return False
    return bool(high < LITTLE * (study.spread(Scored(baseline, row["direction"], "cosine")).mean or 0.0))


def _kappa(study: Study) -> Iterator[Json]:
    """T11: the side of larger (or of smaller) log10 kappa against the better of qnorm and dnorm."""
    for found in kappa_verdicts(fisher(study).rows):
        n, p = found["n"], found["p"]
        decided = n >= 6  # 5 agreements of 5 have p = 0.06
        verdict = MISSING if not n + found["noise"] else UNDERPOWERED
        if decided:
            verdict = REPRODUCED if p < 0.05 and not found["constant"] else NOT
        counts = f"larger {found['larger']}, smaller {found['smaller']}, within noise {found['noise']}"
        statement = f"log10 kappa of {found['matrices']} matrices before training says which side to normalize"
        more = {"counts": counts, "p": p, "constant": found["constant"]}
        yield _row("T11", statement, "both", verdict, Estimate(None, None, None, 0), **more)


def _start(study: Study) -> Iterator[Json]:
    """T12: what length gives from a trained start, over what it gives from a random one."""
    for arm in study.arms:
        if initial(arm) is None or permuted(arm) or arm.settings.norm not in ("qnorm", "dot"):
            continue
        scratch = plain_arm(study, arm.settings.loss, arm.settings.norm)
        for d in trained(arm) if scratch is not None and arm.settings.i2t_weight is None else []:
            assert scratch is not None
            sides = [Scored(a, d, s) for a in (arm, scratch) for s in (NATIVE, "cosine")]
            found = study.estimate(sides, None, lambda x: x[0] / x[1] / (x[2] / x[3]))
            verdict = (
                MISSING if found.lo is None else REPRODUCED if found.lo > 1 else NOT if found.below(1) else UNDERPOWERED
            )
            statement = f"native over cosine, from a trained start over from random weights: {arm.name}"
            yield _row("T12", statement, d, verdict, found)


def _repaid(study: Study) -> Iterator[Json]:
    """B1: corrected minus reversed in the direction that was not trained."""
    for loss, _, other in ONE_WAY:
        arm = plain_arm(study, loss, "qnorm")
        found = Estimate.missing("the study has no such arm")
        if arm is not None:
            found = study.difference(Scored(arm, other, CORRECTED), Scored(arm, other, REVERSED))
        verdict = MISSING if found.lo is None else "yes" if found.above(0) else "no" if found.below(0) else "open"
        yield _row("B1", f"the correction repays what was not trained: {loss}/qnorm, corrected minus reversed", other,
                   verdict, found)  # fmt: skip


def _both(study: Study) -> Iterator[Json]:
    """B2: arms that keep both directions, with length learned and useful in a trained one."""
    said = [(r["arm"], r["learned"], r["useful"]) for r in verdicts(study).rows if not r["null"]]
    for row in keeps_both(study).rows:
        lengths = [u for u in said if u[0] == row["arm"]]
        if row["null"] or not row["by_rule"] or not lengths or not is_number(row["lowest_end"]):
            continue
        kept = bool(row["keeps_both"])
        learned = [u for u in lengths if u[1] == "yes"]  # useful counts in a direction where length was learned
        helps = next((word for word in ("yes", "open") if any(u[2] == word for u in learned)), "no")
        verdict = helps if kept and learned else "no"
        words = f"kept {_yes(kept)}, learned {_yes(bool(learned))}, useful there {helps}"
        found = Estimate(row["lowest_end"], None, None, row["n_seeds"])
        yield _row("B2", f"both directions kept with magnitude: {row['arm']}, served {row['served']}", "both", verdict,
                   found, counts=words)  # fmt: skip


def _nulls(study: Study) -> Iterator[Json]:
    """B3: arms trained on permuted pairs."""
    said = {(r["arm"], r["direction"]): r for r in verdicts(study).rows if r["null"]}
    for arm in [a for a in study.arms if permuted(a)]:
        for d in trained(arm):
            mean = study.mean(Scored(arm, d))
            first = next(iter(arm.runs.values()))
            data = first.json["data"]
            chance = data.get("chance", {}).get(d, 1 / data["n_images"])
            row = said.get((arm.name, d), {})
            positive = [k for k in ("learned", "useful") if row.get(k) == "yes"]
            positive += ["above chance"] if mean.above(chance) else []
            statement = f"nothing is found where there is nothing: {arm.name}"
            verdict = "found" if positive else "clean"
            yield _row("B3", statement, d, verdict, mean, chance=chance, counts=", ".join(positive))


def _yes(value: bool) -> str:
    return "yes" if value else "no"
