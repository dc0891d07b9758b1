"""The randomization test and the smallest detectable effect, held against what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from mmclip.metrics.significance import randomization_p, smallest_detectable


def test_randomization_is_exact_where_it_can_be_and_knows_the_null() -> None:
    a, b = np.zeros(8), np.array([1.0, 2, 3, 4, 5, 6, 7, 8])
    assert randomization_p(a, b) == pytest.approx(2 / 2**8)
    assert randomization_p(a, a) == 1.0
    rng = np.random.default_rng(0)
    p = [randomization_p(rng.normal(size=40), rng.normal(size=40), flips=199, seed=i) for i in range(200)]
    assert 0.01 < np.mean(np.array(p) <= 0.05) < 0.1


def test_the_smallest_detectable_effect_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(1)
    n, s = 200, 0.3
    exact = 2.8 * s / np.sqrt(n)
    assert smallest_detectable(np.zeros(n), rng.normal(0, s, n)) == pytest.approx(exact, rel=0.15)
    hits = [randomization_p(np.zeros(n), rng.normal(exact, s, n), flips=199, seed=i) <= 0.05 for i in range(200)]
    assert 0.7 < np.mean(hits) < 0.9
    assert smallest_detectable([0.0], [1.0]) is None
