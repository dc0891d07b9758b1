"""The study's pictures: labels that do not cover each other, colours that can be seen, odd names and numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmclip.reporting.tradeoff import DARK, LIGHT
from mmclip.study.plots import Point, colours, fractions_figure, frontier_figure, heat_figure, label_offsets


def boxes(at, labels):
    found = label_offsets(at, labels)
    return [(x + dx, y + dy, 2.4 * len(s) + 0.6, 4.0) for (x, y), (dx, dy), s in zip(at, found, labels, strict=False)]


def cover(a, b) -> bool:
    return abs(a[0] - b[0]) < a[2] + b[2] and abs(a[1] - b[1]) < a[3] + b[3]


@given(st.lists(st.tuples(st.integers(0, 250), st.integers(0, 250)), min_size=1, max_size=15))
def test_numbers_cover_neither_each_other_nor_a_point_where_there_is_room(points):
    at = np.array(points, dtype=float)
    labels = [str(i + 1) for i in range(len(points))]
    placed = boxes(at, labels)
    assert not any(cover(a, b) for a, b in itertools.combinations(placed, 2))
    assert not any(cover(a, (x, y, 4, 4)) for a in placed for x, y in at)


def test_a_place_that_is_taken_is_left():
    assert label_offsets(np.zeros((1, 2)), ["1"]) == [(9.0, 0.0)]
    (offset,) = label_offsets(np.zeros((1, 2)), ["1"], [(9, 0, 3, 3)])
    assert offset != (9.0, 0.0)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_colours_of_lambda_rise_in_lightness_and_stand_out(theme):
    light = colours(theme)(np.linspace(0, 1, 20))[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) > 0).all()
    paper = sum(int(theme.paper[i : i + 2], 16) / 255 * w for i, w in ((1, 0.2126), (3, 0.7152), (5, 0.0722)))
    assert np.abs(light - paper).min() > 0.1


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_figures_of_odd_rows_are_drawn(theme):
    names = ["sym cosine", "_$x$", "<b>", "a name that is far longer than a legend has room for, by a lot"]
    points = [
        Point(i + 1, name, norm, 0.5, (0.1, 0.2), None if i else (0.0, 0.01), (0.2, 0.2) if i % 2 else None, i == 0)
        for i, (name, norm) in enumerate(zip(names, ("cosine", "qnorm", "dot", "learned"), strict=True))
    ]
    figure = frontier_figure(theme, points, 0.95)
    assert [t.get_text() for t in figure.axes[0].texts] == ["1", "2", "3", "4"]
    values = np.array([[0.0, np.nan], [0.5, 0.25], [np.nan, np.nan], [1.0, 0.0]])
    heat = heat_figure(theme, names, ["native", "corrected"], values, 1.0)
    assert [t.get_text() for t in heat.axes[0].texts] == [".000", "–", ".500", ".250", "–", "–", "1.000", ".000"]
    row = {"setting": "$a", "scoring": "native", "train_fraction": 0.5, "success@1_mean": 0.3, "success@1_sd": None}
    curve = fractions_figure(theme, [row, row | {"train_fraction": 1.0}, row | {"success@1_mean": None}])
    assert curve.legends[0].get_texts()[0].get_text() == r"\$a, native"
    for drawn in (figure, heat, curve):
        drawn.draw_without_rendering()
