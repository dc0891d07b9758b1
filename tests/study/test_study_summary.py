"""The words of a study follow from its tables: a null result is one, a positive null is an alarm."""

from __future__ import annotations

from mmclip.study.summary import kappa, summary


def keeps(arm: str, lowest: float | None, by_rule: bool = True, reason: str = "") -> dict:
    keep = None if lowest is None else lowest >= 0.95
    return {
        "arm": arm,
        "served": "native",
        "by_rule": by_rule,
        "keeps_both": keep,
        "lowest_end": lowest,
        "reason": reason,
    }


def verdict(arm: str, learned: str, useful: str, null: bool = False, reason: str = "") -> dict:
    return {"arm": arm, "direction": "i2t", "learned": learned, "useful": useful, "null": null, "reason": reason}


def told(**sheets) -> dict:
    empty: dict[str, list] = {"keeps_both": [], "verdicts": [], "correction": [], "fisher": []}
    return {answer["question"]: answer for answer in summary(empty | sheets)}


def test_an_empty_study_answers_nothing():
    assert {answer["kind"] for answer in told().values()} == {"open"}


def test_settings_without_length_do_not_count_and_none_is_said_with_the_nearest():
    verdicts = [verdict("a", "yes", "not shown"), verdict("b", "not shown", "not shown")]
    found = told(
        keeps_both=[keeps("sym cosine", 1.0), keeps("a", 0.9), keeps("b", 0.92), keeps("b", 0.99, False)],
        verdicts=verdicts,
    )
    answer = next(iter(found.values()))
    assert (
        answer["kind"] == "no"
        and "In none of 2 ways to serve 2 arms" in answer["sentence"]
        and "b served native, lower end .920" in answer["sentence"]
    )


def test_keeping_both_is_asked_again_with_learned_and_useful():
    rows = [keeps("a", 0.97), keeps("b", 0.99), keeps("c", None, reason="no baseline")]
    verdicts = [
        verdict("a", "yes", "open"),
        verdict("b", "not shown", "not shown"),
        verdict("c", "", "", reason="no control"),
    ]
    first, second, learned, useful, *_ = told(keeps_both=rows, verdicts=verdicts).values()
    assert first["kind"] == "yes" and "2 of 2" in first["sentence"] and "1 more have no ratio" in first["sentence"]
    assert second["kind"] == "no" and "It was learned in a (i2t)" in second["sentence"]
    assert (learned["kind"], useful["kind"]) == ("yes", "open")
    assert "1 has no verdict: no control" in learned["sentence"]
    verdicts[0]["useful"] = "yes"
    assert list(told(keeps_both=rows, verdicts=verdicts).values())[1]["kind"] == "yes"


def test_nulls_are_clean_dirty_or_missing():
    question = "Are the nulls clean?"
    assert told(verdicts=[verdict("a", "yes", "yes")])[question]["answer"] == "None was run."
    assert told(verdicts=[verdict("n", "not shown", "open", True)])[question]["kind"] == "yes"
    dirty = told(verdicts=[verdict("n", "yes", "open", True)])[question]
    assert dirty["kind"] == "no" and "n (i2t)" in dirty["sentence"]
    lacking = told(verdicts=[verdict("n", "", "", True, "no control")])[question]
    assert lacking["kind"] == "open" and "no control" in lacking["sentence"]


def test_the_correction_counts_untrained_directions_of_real_arms():
    def row(lo, hi, trained=False, null=False):
        found = {"corrected_minus_reversed_lo": lo, "corrected_minus_baseline_native_hi": hi}
        return found | {"trained": trained, "null": null}

    rows = [row(0.01, 0.0), row(-0.01, -0.02), row(0.5, 0.5, trained=True), row(0.5, 0.5, null=True), row(None, None)]
    answer = told(correction=rows)["Does the correction give back the direction that was not trained?"]
    assert answer["kind"] == "open" and "1 of 2" in answer["sentence"] and "in 1 of 2 it is level" in answer["sentence"]


def test_kappa_is_underpowered_not_shown_or_agrees():
    def rows(*told):
        names = ("log10_kappa_query_raw", "log10_kappa_document_raw", "winner", "reason")
        return [dict(zip(names, (*row, ""), strict=True)) for row in told]

    alternating = [(3, 2, "qnorm"), (2, 3, "dnorm")]
    assert kappa(rows(*alternating))["answer"] == "Underpowered."
    assert kappa(rows(*alternating * 4))["kind"] == "yes"
    assert kappa(rows(*alternating * 4, *[(3, 2, "dnorm")] * 6))["answer"] == "Not shown."
    constant = kappa(rows(*[(3, 2, "qnorm")] * 8))
    assert constant["kind"] == "no" and "always naming it does as well" in constant["sentence"]
    assert kappa([])["kind"] == "open"
