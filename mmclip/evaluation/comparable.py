"""Which runs can be compared, and which can be control or baseline of which."""

from __future__ import annotations

from typing import Any

from mmclip.errors import UserError, printable
from mmclip.evaluation.results import Results

Json = dict[str, Any]


def _called(run: Results) -> str:
    """A model's name, and how it was trained: runs of one study start from one model."""
    trained = run.json.get("trained_with") or {}
    told = [str(trained[k]) for k in ("loss", "norm") if trained.get(k)]
    told += [f"seed {run.seed}"] if run.seed is not None else []
    return printable(run.json.get("model"), 60) + (f" ({printable(', '.join(told), 60)})" if told else "")


def same_data(a: Results, b: Results) -> None:
    """Errors: UserError naming both sides where two runs did not answer the same queries over the same candidates."""
    for key in ("fingerprint", "n_queries", "n_images", "n_texts", "n_documents"):
        left, right = a.json["data"].get(key), b.json["data"].get(key)
        if left != right:
            names = [_called(r) for r in (a, b)]
            raise UserError(
                f"runs over different data cannot be compared: {key} is {printable(left, 60)} for {names[0]} and "
                f"{printable(right, 60)} for {names[1]}; evaluate both on the same data"
            )
    for pool in a.json.get("pools", {}).keys() & b.json.get("pools", {}).keys():
        marks = [r.json["pools"][pool].get("fingerprint") for r in (a, b)]
        if marks[0] != marks[1]:
            raise UserError(
                f"runs over different distractors cannot be compared: pool {printable(pool, 60)} is not the same in both"
            )


def seeds_differ(run: Results, control: Results) -> bool:
    """Whether both say their seed, and not the same."""
    return len({run.seed, control.seed} - {None}) > 1


def losses_differ(mine: Json, controls: Json) -> bool:
    """Whether two losses weigh the directions differently: sym with i2t_weight 1 is asym-i2t, both with q2d_weight 1
    is q2d."""
    if is_text(mine) != is_text(controls) or mine.get("i2t_weight_end") != controls.get("i2t_weight_end"):
        return True
    weights = [_weight(facts) for facts in (mine, controls)]
    return weights[0] != weights[1] if None not in weights else mine.get("loss") != controls.get("loss")


def is_text(facts: Json) -> bool:
    """Whether facts (``trained_with``) are those of a text model."""
    return facts.get("task") == "text"


def _weight(facts: Json) -> Any:
    return facts.get("q2d_weight" if is_text(facts) else "i2t_weight")


def check_baseline(baseline: Results, run: Results) -> None:
    """Of images and texts the sym/cosine run; of text the run's own loss with cosine."""
    trained = baseline.json.get("trained_with") or {}
    native = baseline.json["evaluation"]["native"]
    cosine = (native["gamma_q"], native["gamma_d"]) == (1, 1)
    told = f"the baseline was trained with {printable(trained.get('loss'))} and the exponents {native['gamma_q']}, "
    told += f"{native['gamma_d']}: "
    facts = run.json.get("trained_with") or {}
    if is_text(facts):
        if not cosine or losses_differ(trained, facts):
            raise UserError(f"{told}a baseline is a cosine run of the run's loss, {printable(facts.get('loss'))}")
        return
    both = trained.get("loss") in (None, "sym") and trained.get("i2t_weight") in (None, 0.5) and not is_text(trained)
    if not both or "i2t_weight_end" in trained or not cosine:
        raise UserError(f"{told}a baseline is a sym/cosine run, both directions of equal weight")


def check_control(run: Results, control: Results) -> None:
    facts = [r.json.get("trained_with") or {} for r in (control, run)]
    if losses_differ(*facts):
        name = "q2d_weight" if is_text(facts[1]) else "i2t_weight"
        told = [printable(f.get("loss")) + (f" ({name} {w})" if (w := f.get(name)) else "") for f in facts]
        raise UserError(
            f"the control was trained with the loss {told[0]}, the run with {told[1]}: a control has the run's loss"
        )
    if seeds_differ(run, control):
        raise UserError(
            f"the control was trained with seed {control.seed}, the run with {run.seed}: a control has the run's seed"
        )
    gamma_d = control.json["evaluation"]["native"]["gamma_d"]
    earlier = (control.json.get("trained_with") or {}).get("gamma_from", "cosine")
    if earlier not in ("cosine", "dnorm"):
        raise UserError(
            f"the control began with {printable(earlier, 40)}, which keeps its documents' length: no loss of a control "
            "ever sees it"
        )
    if gamma_d != 1:
        raise UserError(
            f"the control keeps its documents' length (gamma_d {gamma_d}); a control is trained with gamma_d 1: "
            "cosine or dnorm"
        )
