"""Finished runs for the report's tests: planted embeddings and real pictures; and a page, taken apart."""

from __future__ import annotations

import html.parser
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmclip.embeddings.files import Distractors, Embeddings
from mmclip.evaluation.results import Results, save_results
from mmclip.reporting.table import Table, make_console, show
from mmclip.retrieval.hubness import TRANSDUCTIVE, QueryBank
from mmclip.similarity import Direction, Exponents
from tests.helpers.evaluating import evaluate_clip

N, CAPTIONS, DIM = 40, 3, 16
VOID = {"meta", "link", "img", "source", "line", "br"}  # tags that nothing closes
QNORM, COSINE = Exponents(1.0, 0.0), Exponents(1.0, 1.0)


def planted(seed: int = 0, noise: float = 1.5, captions: Sequence[str] | None = None) -> Embeddings:
    """40 pictures with three captions each, 10 distractors a side."""
    gen = torch.Generator().manual_seed(seed)
    image = torch.randn(N, DIM, generator=gen)
    text = image.repeat_interleave(CAPTIONS, 0) + noise * torch.randn(N * CAPTIONS, DIM, generator=gen)
    extra = [torch.randn(10, DIM, generator=gen) for _ in range(2)]
    return Embeddings(
        image=image,
        text=text,
        pairs=torch.tensor([[t // CAPTIONS, t] for t in range(len(text))]),
        image_ids=[f"k{i:03}.png" for i in range(N)],
        captions=list(captions or [f"caption {t} of picture {t // CAPTIONS}" for t in range(len(text))]),
        distractors=[Distractors("distractors", *extra)],
    )


def make_run(
    folder: Path,
    pictures: Path,
    native: Exponents = QNORM,
    loss: str = "asym-i2t",
    norm: str = "qnorm",
    noise: float = 1.5,
    captions: Sequence[str] | None = None,
    bank: bool = False,
    **about: Any,
) -> Results:
    """An evaluated run with two kinds of training curves; with a ``bank`` also the other direction, corrected."""
    trained = {"loss": loss, "norm": norm, "gamma_q": native.gamma_q, "gamma_d": native.gamma_d}
    data = {"path": str(pictures), "split": "csv"}
    facts = {"model": "tiny", "trained_with": trained, "data": data, "versions": {"mmclip": "0.1.0"}, **about}
    backwards: Any = {"scales": {Direction.I2T: 2.0}, "bank": QueryBank(TRANSDUCTIVE)} if bank else {}
    results = evaluate_clip(planted(0, noise, captions), native, facts, resamples=30, **backwards)
    save_results(results, folder)
    (folder / "config.yaml").write_text(f"loss: {loss}\nnorm: {norm}\nlr: 0.001\n", encoding="utf-8")
    lines: list[dict[str, float]] = [{"step": s, "loss": 5 / s} for s in (1, 10, 20, 30)]
    lines[2] |= {"val_i2t_success@1_native": 0.5, "val_i2t_success@1_cosine": 0.4}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return results


HOSTILE = "[red]x[/red] [/] \x1b[31m\n:smile: \u202e$_^ 漢字<script>" + "n" * 80


def printed(*tables: Table) -> str:
    """Tables as a terminal shows them."""
    out = io.StringIO()
    show(tables, make_console(out))
    return out.getvalue()


def clip_run(native: Exponents, loss: str, name: str = "m", seed: int = 0) -> Results:
    """An evaluation with levels, object counts and distractors."""
    gen = torch.Generator().manual_seed(0)
    image = torch.randn(N, 12, generator=gen)
    text = image.repeat_interleave(2, 0) + torch.randn(2 * N, 12, generator=gen)
    own = torch.Generator().manual_seed(seed)
    extra = Distractors("distractors", torch.randn(9, 12, generator=gen), torch.randn(9, 12, generator=gen) * 50)
    data = Embeddings(
        image=image * (1 + torch.rand(N, 1, generator=own)),
        text=text,
        pairs=torch.tensor([[t // 2, t] for t in range(2 * N)]),
        image_ids=[HOSTILE + str(i) for i in range(N)],
        captions=[HOSTILE + " word" * (t % 12) for t in range(2 * N)],
        levels=["full", HOSTILE] * N,
        n_objects=[i % 4 for i in range(N)],
        distractors=[extra],
    )
    return evaluate_clip(data, native, {"model": name, "trained_with": {"loss": loss}}, resamples=60)


def text_run(
    native: Exponents = QNORM, loss: str = "q2d", seed: int = 0, model: str = "m", documents: int = 90, **facts: Any
) -> Results:
    """An evaluation of 60 queries over ``documents``."""
    from tests.helpers.evaluating import collection_of, evaluate_text, vectors_of

    c = collection_of(n_q=60, n_d=documents, seed=1, notes=[HOSTILE])
    _, document = vectors_of(c, 1)
    first = torch.tensor([int(c.pairs[c.pairs[:, 0] == q, 1][0]) for q in range(len(c.queries))])
    query = document.index_select(0, first) + 0.4 * vectors_of(c, 2 + seed)[0]
    said = {"task": "text", "loss": loss, "q2d_weight": None, "gamma_q": native.gamma_q, "gamma_d": native.gamma_d}
    about = {"model": model, "trained_with": said | facts}
    return evaluate_text(c, query, document, native, about, resamples=50)


def make_pictures(folder: Path) -> Path:
    """The pictures of ``planted`` as a CSV with plain files, one colour each."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["filepath\ttitle"]
    for i in range(N):
        name = f"k{i:03}"
        Image.new("RGB", (40, 30), (6 * i, 255 - 6 * i, 90)).save(folder / f"{name}.png")
        lines += [f"{name}.png\tcaption {i * CAPTIONS + j} of picture {i}" for j in range(CAPTIONS)]
    path = folder / "pairs.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Page(html.parser.HTMLParser):
    """The tags of a page with their attributes, its text by tag, and whether every tag is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []
        self.words = re.sub(r"\s+", " ", " ".join(self.text))
        self.dots = [a["class"] for a in self.all("span") if str(a.get("class")).startswith("dot ")]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]
