"""Whether mmclip's success@k is clip-benchmark's, on saved embeddings: by cosine, and by dot through its augmentation.

    python scripts/embed.py --model RUN --data DIR/flickr8k --split val --output x.safetensors
    python benchmarks/agreement.py --embeddings x.safetensors

clip-benchmark's own zeroshot_retrieval.evaluate judges the vectors as those of a model (without autocast): raw ones for
cosine, and for dot those that pass its normalization with their lengths (mmclip.evaluation.clip_benchmark). clip-benchmark breaks
ties by chance and mmclip against the model, so the numbers may differ in as many queries as are tied, and no more: the
exit code is 1 where they do.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

from mmclip import metrics
from mmclip.cli import run_guarded
from mmclip.embeddings.files import Embeddings, load_embeddings
from mmclip.errors import UserError
from mmclip.evaluation.clip_benchmark import ScoredModel
from mmclip.retrieval.ranking import rank_both
from mmclip.similarity import CLIP_DIRECTIONS, Normalization

KS = (1, 5, 10)
BATCH = 64  # images at once


class Saved(nn.Module):
    """Towers whose features are looked up: a picture is its row, a caption's token its row."""

    def __init__(self, saved: Embeddings) -> None:
        super().__init__()
        self.image, self.text = saved.image, saved.text

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        return (None if image is None else self.image[image.flatten()], None if text is None else self.text[text])


def tokenize(rows: list[str]) -> Tensor:
    return torch.tensor([int(row) for row in rows])


def theirs(saved: Embeddings, scoring: Normalization) -> dict[str, float]:
    """clip-benchmark's numbers, by its names."""
    from clip_benchmark.metrics import zeroshot_retrieval

    assert saved.owner is not None
    captions: list[list[str]] = [[] for _ in saved.image]
    for row, owner in enumerate(saved.owner):
        captions[owner].append(str(row))
    batches = [
        (torch.arange(start, min(start + BATCH, len(captions)))[:, None], captions[start : start + BATCH])
        for start in range(0, len(captions), BATCH)
    ]
    model = ScoredModel(Saved(saved), scoring.exponents)
    found: dict[str, float] = zeroshot_retrieval.evaluate(
        model, batches, tokenize, "cpu", amp=False, recall_k_list=list(KS)
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embeddings", required=True, metavar="FILE", help="as scripts/embed.py writes them")
    saved = load_embeddings(parser.parse_args().embeddings)
    if saved.owner is None or set(saved.owner) != set(range(len(saved.image))):
        raise UserError(
            "clip-benchmark knows no relevance but a caption's own image: each needs captions, and one image"
        )
    scorings = {n.value: n.exponents for n in (Normalization.COSINE, Normalization.DOT)}
    own_pairs = torch.tensor([[image, text] for text, image in enumerate(saved.owner)])
    ways = rank_both(saved.image, saved.text, own_pairs, scorings)
    apart = 0
    print(f"{len(saved.image):,} images, {len(saved.text):,} captions, D = {saved.image.shape[1]}")
    print(f"{'scoring':8} {'way':4} {'k':>3} {'clip-benchmark':>15} {'mmclip':>10} {'queries apart':>14} {'tied':>6}")
    for name in scorings:
        found = theirs(saved, Normalization(name))
        for direction, rankings in zip(CLIP_DIRECTIONS, ways, strict=True):
            ranking = rankings[name]
            values = metrics.per_query(ranking.ranks, ranking.offsets)
            for k in KS:
                stock, own = found[f"{direction.document_side}_retrieval_recall@{k}"], values[f"success@{k}"].mean()
                queries = round(abs(stock - own) * len(ranking.queries))
                apart += queries > ranking.n_tied
                print(f"{name:8} {direction:4} {k:3} {stock:15.4f} {own:10.4f} {queries:14} {ranking.n_tied:6}")
    print("the numbers agree" if not apart else f"{apart} numbers are further apart than ties explain")
    sys.exit(bool(apart))


if __name__ == "__main__":
    run_guarded(main)
