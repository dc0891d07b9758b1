"""Several runs against the first: Holm's correction where there are several."""

from __future__ import annotations

import numpy as np

from mmclip.evaluation.comparison import against_first
from mmclip.metrics import holm


def test_several_comparisons_are_corrected_and_one_is_not() -> None:
    rng = np.random.default_rng(2)
    first, *others = (rng.normal(m, 1, 50) for m in (0, 0.1, 0.6, 0.9))
    found = against_first([first, *others], flips=499)
    assert [f["p_holm"] for f in found] == holm([f["p"] for f in found])
    assert all(f["p_holm"] >= f["p"] for f in found) and found[2]["p_holm"] < 0.05
    assert found[1] | {"p_holm": 0} == against_first([first, others[1]], flips=499)[0] | {"p_holm": 0}
