"""Pictures: one SVG for light and dark, nothing from data is markup, odd names and empty arrays are drawn."""

from __future__ import annotations

import warnings
import xml.etree.ElementTree as ET
from itertools import combinations

import numpy as np
import pytest

from mmclip.reporting import figures
from mmclip.reporting.figures import DARK, PAPER, RUNS, Point, Series, curves_figure, norms_figure, scatter_figure

RNG = np.random.default_rng(0)
EVIL = '<script>alert("1")</script> $x_1$ _a style="fill: #0072b2"'


def test_a_picture_is_its_file_and_its_element_without_markup_of_names(tmp_path):
    series = [Series(EVIL, 0, False, [1, 2], [3, 4]), Series("", 1, True, [1, 2], [3, 4])]
    picture = figures.write_picture(curves_figure(series, "loss"), tmp_path, "name", EVIL, EVIL)
    root = ET.parse(tmp_path / "name.svg").getroot()
    words = ["".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "loss" in words and any(w.strip().startswith("<script>alert") and "$x_1$" in w for w in words)
    assert root.get("aria-label") == EVIL
    element = picture.to_html()
    assert "<script" not in element and "http" not in element and element.count("<svg") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["name.svg"]
    assert element.count("#0072b2") >= 2 and "#d55e00" in element  # both curves, and a name that is no colour


def test_the_style_sheet_has_a_dark_colour_for_every_light_one():
    css = figures.style_sheet()
    for light, dark in DARK.items():
        assert f'[style*="fill: {light}"]{{fill:{dark}' in css and f'[style*="stroke: {light}"]{{stroke:{dark}' in css
    assert len(set(DARK.values())) == len(DARK) and all(f".r{i}{{" in css for i in range(len(RUNS)))


def test_a_picture_does_not_depend_on_when_it_is_drawn(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        figures.write_picture(norms_figure(np.arange(9.0), np.arange(5.0), "text"), tmp_path / name, "x", "", "")
    assert (tmp_path / "a" / "x.svg").read_bytes() == (tmp_path / "b" / "x.svg").read_bytes()


@pytest.mark.parametrize(("relevant", "irrelevant"), [([], []), ([1.0], []), ([2.0, 2.0], [2.0]), ([0.0], [0.0])])
def test_few_or_equal_norms_are_drawn(relevant, irrelevant):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms_figure(np.array(relevant), np.array(irrelevant), "image").draw_without_rendering()


def test_a_histogram_has_area_one_for_each():
    figure = norms_figure(RNG.normal(5, 1, 50), RNG.normal(0, 1, 5000), "text", RUNS[3])
    areas = [float((p.get_data().values * np.diff(p.get_data().edges)).sum()) for p in figure.axes[0].patches]
    assert areas == pytest.approx([1.0] * 4)


def test_a_scatter_shows_every_kind():
    relevant = RNG.random((30, 10)) < 0.2
    figure = scatter_figure(RNG.random((30, 10)), RNG.random((30, 10)), relevant, "text", RUNS[1])
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [(~relevant).sum(), relevant.sum()]
    assert figure.axes[0].lines[1].get_color() == RUNS[1]  # relevant: the run's colour, whichever that is


def test_curves_keep_their_runs_colour_and_an_axis_shows_a_constant_as_one():
    series = [Series("a", 0, False, [1, 2], [0.6, 0.599825]), Series("", 13, True, [1, 2], [0.6, 0.5999])]
    figure = curves_figure(series, "α")
    assert [line.get_color() for line in figure.axes[0].lines] == [RUNS[0], RUNS[1]]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a"]
    low, high = figure.axes[0].get_ylim()
    assert high - low == pytest.approx(0.06) and low < 0.5999 < high
    many = curves_figure([Series(f"run {i}", i, False, range(100), range(100)) for i in range(12)], "loss")
    alone = curves_figure(series[:1], "loss")
    for one in (many, alone):
        one.draw_without_rendering()
    tall, low = (one.axes[0].get_window_extent().height for one in (many, alone))
    assert tall > 0.8 * low  # a long legend leaves the curves their room


def test_a_frontier_names_few_arms_and_all_that_matter():
    at = [(0.1 + 0.02 * i, 0.5 - 0.02 * i) for i in range(20)]  # no one exceeds another
    points = [Point(i + 1, f"arm {i}", "qnorm", 0.5, p, (0.01, 0.01), None, i == 19) for i, p in enumerate(at)]
    worse = Point(21, "worse", "dot", 0.5, (0.05, 0.05), None, None, False)
    assert worse.number not in {p.number for p in figures.named_points([*points, worse], most=30)}
    assert len(figures.named_points(points, most=30)) == 20
    figure = figures.frontier_figure([*points, worse], 0.95)
    numbers = {t.get_text() for t in figure.axes[0].texts}
    assert len(numbers) == figures.SHOWN_ARMS + 1 and "20" in numbers  # the baseline
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels[-1] == "other arms" and len(figure.axes[0].lines) >= 21  # everyone is a dot at least


def test_figures_of_odd_rows_are_drawn(tmp_path):
    names = ["sym cosine", "_$x$", "<b>", "a name that is far longer than a legend has room for, by a lot"]
    points = [
        Point(i + 1, name, norm, 0.5, (0.1, 0.2), None if i else (0.0, 0.01), (0.2, 0.2) if i % 2 else None, i == 0)
        for i, (name, norm) in enumerate(zip(names, ("cosine", "qnorm", "dot", "learned"), strict=True))
    ]
    values = np.array([[0.0, np.nan], [0.5, 0.25], [np.nan, np.nan], [1.0, 0.0]])
    heat = figures.heat_figure(names, ["native", "corrected"], values, 1.0)
    assert [t.get_text() for t in heat.axes[0].texts] == [".000", "–", ".500", ".250", "–", "–", "1.000", ".000"]
    row = {"setting": "$a", "scoring": "native", "train_fraction": 0.5, "success@1_mean": 0.3, "success@1_sd": None}
    curve = figures.fractions_figure([row, row | {"train_fraction": 1.0}, row | {"success@1_mean": None}])
    assert curve.legends[0].get_texts()[0].get_text() == r"\$a, native"
    gains = figures.intervals_figure(names, [0.1] * 4, [(0.0, 0.2)] * 4, [0.01] * 4, "gain")
    for i, figure in enumerate((figures.frontier_figure(points, 0.95), heat, curve, gains)):
        figures.write_picture(figure, tmp_path, str(i), "", "")
        assert figures.write_png(figure, tmp_path / f"{i}.png").read_bytes().startswith(b"\x89PNG")


def luminance(colour: str) -> float:
    return sum(int(colour[i : i + 2], 16) / 255 * w for i, w in ((1, 0.2126), (3, 0.7152), (5, 0.0722)))


def test_the_colours_of_lambda_rise_in_lightness_and_stand_out_on_both_papers():
    light = figures.colours()(np.linspace(0, 1, 20))[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) > 0).all()
    assert min(np.abs(light - luminance(paper)).min() for paper in (PAPER, DARK[PAPER])) > 0.1


def oklab(colour: str, simulated: np.ndarray) -> np.ndarray:
    """Ottosson's perceptual coordinates of #rrggbb as an eye with these cones sees it: 0 to 1 and two of about ±.3."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return lab @ np.cbrt(cones @ np.clip(simulated @ linear, 0, 1))


# Machado, Oliveira and Fernandes 2009, severity 1
EYES = {
    "all cones": (0.11, np.eye(3)),
    "no green": (0.04, np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])),
    "no red": (0.04, np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])),
}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("of", [(*RUNS, PAPER), (*map(DARK.get, RUNS), DARK[PAPER])], ids=["light", "dark"])
def test_twelve_colours_stay_apart(of, eye):
    least, simulated = EYES[eye]
    points = [oklab(colour, simulated) for colour in of]
    assert min(np.linalg.norm(a - b) for a, b in combinations(points, 2)) > least
