"""Which runs can be compared, and which can be control or baseline of which."""

from __future__ import annotations

from typing import Any

from mmclip.errors import UsageError, one_line
from mmclip.results import Results

Json = dict[str, Any]


def same_data(a: Results, b: Results) -> None:
    """Errors: UsageError naming both sides where two runs did not answer the same queries over the same candidates."""
    for key in ("fingerprint", "n_queries", "n_images", "n_texts"):
        left, right = a.json["data"].get(key), b.json["data"].get(key)
        if left != right:
            names = [one_line(r.json.get("model"), 60) for r in (a, b)]
            raise UsageError(
                f"runs over different data cannot be compared: {key} is {one_line(left, 60)} for {names[0]} and "
                f"{one_line(right, 60)} for {names[1]}; evaluate both on the same data"
            )
    for pool in a.json.get("pools", {}).keys() & b.json.get("pools", {}).keys():
        marks = [r.json["pools"][pool].get("fingerprint") for r in (a, b)]
        if marks[0] != marks[1]:
            raise UsageError(
                f"runs over different distractors cannot be compared: pool {one_line(pool, 60)} is not the same in both"
            )


def seeds_differ(run: Results, control: Results) -> bool:
    """Whether both say their seed, and not the same."""
    return len({run.seed, control.seed} - {None}) > 1


def losses_differ(mine: Json, controls: Json) -> bool:
    """Whether two losses weigh the directions differently: sym with i2t_weight 1 is asym-i2t."""
    if mine.get("i2t_weight_end") != controls.get("i2t_weight_end"):
        return True
    weights = [facts.get("i2t_weight") for facts in (mine, controls)]
    return weights[0] != weights[1] if None not in weights else mine.get("loss") != controls.get("loss")


def check_baseline(baseline: Results) -> None:
    trained = baseline.json.get("trained_with") or {}
    native = baseline.json["evaluation"]["native"]
    both = trained.get("loss") in (None, "sym") and trained.get("i2t_weight") in (None, 0.5)
    if not both or "i2t_weight_end" in trained or (native["gamma_q"], native["gamma_d"]) != (1, 1):
        raise UsageError(
            f"the baseline was trained with {one_line(trained.get('loss'))} and the exponents {native['gamma_q']}, "
            f"{native['gamma_d']}: a baseline is a sym/cosine run, both directions of equal weight"
        )


def check_control(run: Results, control: Results) -> None:
    facts = [r.json.get("trained_with") or {} for r in (control, run)]
    if losses_differ(*facts):
        told = [one_line(f.get("loss")) + (f" (i2t_weight {w})" if (w := f.get("i2t_weight")) else "") for f in facts]
        raise UsageError(
            f"the control was trained with the loss {told[0]}, the run with {told[1]}: a control has the run's loss"
        )
    if seeds_differ(run, control):
        raise UsageError(
            f"the control was trained with seed {control.seed}, the run with {run.seed}: a control has the run's seed"
        )
    gamma_d = control.json["evaluation"]["native"]["gamma_d"]
    earlier = (control.json.get("trained_with") or {}).get("gamma_from", "cosine")
    if earlier not in ("cosine", "dnorm"):
        raise UsageError(
            f"the control began with {one_line(earlier, 40)}, which keeps its documents' length: no loss of a control "
            "ever sees it"
        )
    if gamma_d != 1:
        raise UsageError(
            f"the control keeps its documents' length (gamma_d {gamma_d}); a control is trained with gamma_d 1: "
            "cosine or dnorm"
        )
