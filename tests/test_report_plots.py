"""The report's pictures: sizes, palettes, both kinds of page, and arrays with nothing in them."""

from __future__ import annotations

import base64
import io
import warnings

import numpy as np
import pytest
from PIL import Image

from mmclip.plots import DARK, LIGHT
from mmclip.report_plots import COLOURS, Series, curves_figure, lengths_figure, scatter_figure, write_picture

RNG = np.random.default_rng(0)


def test_a_picture_is_written_twice_and_is_the_page_s(tmp_path):
    def draw(theme):
        return lengths_figure(theme, RNG.normal(5, 1, 90), RNG.normal(4, 1, 200), "text")

    picture = write_picture(tmp_path, "name", "alt", "caption", draw)
    for uri, theme in ((picture.light, LIGHT), (picture.dark, DARK)):
        content = (tmp_path / f"name-{theme.name}.png").read_bytes()
        assert base64.b64decode(uri.partition(",")[2]) == content
        assert len(content) < 40_000
        with Image.open(io.BytesIO(content)) as image:
            assert (image.width // 2, image.height // 2) == (picture.width, picture.height)
            assert len(image.getcolors()) <= COLOURS
            corner = image.convert("RGB").getpixel((0, 0))
            assert "#{:02x}{:02x}{:02x}".format(*corner) == theme.paper
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("relevant", "irrelevant"), [([], []), ([1.0], []), ([2.0, 2.0], [2.0]), ([0.0], [0.0])])
def test_few_or_equal_lengths_are_drawn(relevant, irrelevant):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = lengths_figure(LIGHT, np.array(relevant), np.array(irrelevant), "image")
        figure.canvas.draw()


def test_a_histogram_has_area_one_for_each():
    figure = lengths_figure(LIGHT, RNG.normal(5, 1, 50), RNG.normal(0, 1, 5000), "text")
    areas = [float((p.get_data().values * np.diff(p.get_data().edges)).sum()) for p in figure.axes[0].patches]
    assert areas == pytest.approx([1.0] * 4)


def test_a_scatter_shows_every_kind():
    relevant = RNG.random((30, 10)) < 0.2
    figure = scatter_figure(DARK, RNG.random((30, 10)), RNG.random((30, 10)), relevant, "text")
    sizes = [len(c.get_offsets()) for c in figure.axes[0].collections]
    assert sizes == [(~relevant).sum(), relevant.sum()]


def test_curves_keep_their_runs_colour_and_name():
    series = [Series("$x_1$", 0, False, [1, 2], [3, 4]), Series("", 8, True, [1, 2], [3, 4])]
    figure = curves_figure(LIGHT, series, "loss", log=True)
    figure.canvas.draw()
    assert [line.get_color() for line in figure.axes[0].lines] == [LIGHT.runs[0], LIGHT.runs[1]]
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == [r"\$x_1\$"]
