"""The report in a real browser, wide and narrow, light and dark: Debian's chromium, without a window."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mmclip.reporting.page import write_page
from tests.helpers.reporting import COSINE, QNORM, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
WIDTHS = (1280, 400)
# A window has a least width, a frame has none: both widths stand in frames of one page, which measures them.
WRAPPER = """<!DOCTYPE html><meta charset="utf-8"><body>%(frames)s<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, root = page.documentElement;
    const dark = frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches;
    const outside = [...page.querySelectorAll("body *")].filter((e) =>
      e.getBoundingClientRect().right > root.clientWidth + 1 && !e.closest(".scroll, svg *"));
    return {
      width: root.clientWidth, scroll: root.scrollWidth, dark: dark,
      outside: outside.slice(0, 5).map((e) => e.outerHTML.slice(0, 80)),
      tables: page.querySelectorAll("table").length,
      pictures: [...page.images].map((i) => [i.naturalWidth, i.getBoundingClientRect().width]),
      shades: [...page.querySelectorAll("svg.plot")].map((p) => [...p.querySelectorAll("text")].map(
        (t) => frame.contentWindow.getComputedStyle(t).fill).join(" ")),
      paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
      first: [...page.querySelectorAll("svg.plot")].map((p) => p.getBoundingClientRect().top),
      requests: frame.contentWindow.performance.getEntriesByType("resource")
        .map((r) => r.name).filter((n) => !n.startsWith("data:")),
    };
  });
  const out = document.createElement("pre");
  out.id = "found"; out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>"""


def look(page: Path, folder: Path, dark: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """(what was measured at each width, lines of the console)."""
    frames = [f'<iframe src="{page.as_uri()}" style="width:{w}px;height:900px;border:0"></iframe>' for w in WIDTHS]
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER % {"frames": "".join(frames)}, encoding="utf-8")
    flags = "headless no-sandbox disable-gpu hide-scrollbars allow-file-access-from-files window-size=1700,1200 v=0"
    flags += f" enable-logging=stderr virtual-time-budget=10000 blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [str(CHROMIUM), *(f"--{flag}" for flag in flags.split()), profile, "--dump-dom", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), [x for x in done.stderr.splitlines() if "CONSOLE" in x]


@pytest.fixture(scope="module")
def looks(pictures, tmp_path_factory):
    """(light, dark) looks at a comparison of two runs, whose captions and names are of the awkward kind."""
    folder = tmp_path_factory.mktemp("browser")
    captions = [f"caption {i} " + ("verylongword" * 12 if i % 7 == 0 else "<b>bold</b>") for i in range(120)]
    names = {"baseline": COSINE, "a-run-with-a-name-that-goes-on-and-on_" + "x" * 60: QNORM}
    alarms = {"still": "the loss stands " + "s" * 200}
    for name, native in names.items():
        make_run(folder / name, pictures, native, captions=captions, bank=True, alarms=alarms)
    page = write_page({n: folder / n for n in names}, folder / "report.html", control=folder / "baseline")
    return [look(page, folder, dark) for dark in (False, True)]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_whole_at_both_widths(looks, dark):
    found, console = looks[dark]
    assert console == []
    assert [f["width"] for f in found] == list(WIDTHS)
    for frame in found:
        assert frame["dark"] is dark
        assert frame["outside"] == [] and frame["scroll"] <= frame["width"]
        assert frame["tables"] >= 8 and len(frame["pictures"]) > 30
        assert all(natural > 0 for natural, _ in frame["pictures"])
        assert frame["first"][0] < 1500  # the answer and the first picture come first
        assert frame["requests"] == []
        assert frame["paper"] == ("rgb(23, 26, 31)" if dark else "rgb(255, 255, 255)")


def test_dark_pages_have_dark_pictures(looks):
    light, dark = (found[0]["shades"] for found, _ in looks)
    assert len(light) == len(dark) > 10
    assert "rgb(28, 32, 36)" in light[0] and "rgb(28, 32, 36)" not in "".join(dark)


def test_the_instrument_sees_what_it_looks_for(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<!DOCTYPE html><body style="margin:0"><div style="width:600px">x</div><img src="data:image/png;base64,xx">'
        '<script>console.error("seen")</script>',
        encoding="utf-8",
    )
    (wide, narrow), console = look(bad, tmp_path)
    assert any("seen" in line for line in console)
    assert wide["scroll"] == wide["width"] and narrow["scroll"] == 600 and narrow["outside"]
    assert wide["pictures"][0][0] == 0
