"""FAISS flat, HNSW and int8 against mmclip's exact ranking, of embeddings whose norms count.

    mmclip embed --model logs/my-run --data DIR --bank DIR --output x.safetensors
    python benchmarks/serving.py --embeddings x.safetensors
    python benchmarks/serving.py                                 planted data, seconds

For each direction and each scoring that the file allows (native; corrected where there is evidence) the first row says
whether FAISS's flat inner product returns the ids of mmclip's exact ranking: "apart" counts queries whose ids differ,
"beyond rounding" those of them whose scores differ by more than 1e-6 |q||d| as well. Every other row has recall@K of
the exact list, and success@1. "normalized" is what an engine with a cosine metric returns. The exit code is 1 where
flat, or the augmentation in a normalizing index, is apart beyond rounding. Needs pip install -e '.[serving]'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import refuse
from numpy.typing import NDArray
from torch import Tensor

from mmclip.embeddings.files import Embeddings, load_embeddings
from mmclip.embeddings.serving import ROUNDING, index_vectors, norm_augmentation, recall_at_k
from mmclip.errors import UserError
from mmclip.models.metadata import native_exponents
from mmclip.retrieval.hubness import document_offsets
from mmclip.retrieval.ranking import Ranking, rank
from mmclip.roles import CLIP_DIRECTIONS, Direction, Normalization
from mmclip.similarity import magnitude, normalize

Array = NDArray[Any]
Search = Callable[[Array, int], Array]
CAPTIONS = 5
LINKS, EF_CONSTRUCTION = 32, 200  # of HNSW


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embeddings", type=Path, metavar="FILE", help="written by scripts/embed.py [planted data]")
    parser.add_argument("--k", type=int, default=10, help="length of the lists [10]")
    parser.add_argument("--images", type=int, default=2000, metavar="N", help="planted, with 5 captions each [2000]")
    parser.add_argument("--dim", type=int, default=64, metavar="D", help="of the planted [64]")
    parser.add_argument("--ef-search", type=int, default=64, metavar="EF", help="HNSW's, when it searches [64]")
    args = parser.parse_args()
    try:
        import faiss
    except ImportError:
        refuse("faiss is not installed: pip install -e '.[serving]'")
    try:
        saved = load_embeddings(args.embeddings) if args.embeddings else planted(args.images, args.dim)
    except UserError as error:
        refuse(error)
    apart = 0
    for direction in CLIP_DIRECTIONS:
        for scoring in ("native", *["corrected"] * (direction.value in saved.evidence)):
            apart += measure(faiss, saved, direction, scoring, args)
    return 1 if apart else 0


def measure(faiss: Any, saved: Embeddings, direction: Direction, scoring: str, args: argparse.Namespace) -> int:
    """Print the rows of one scoring; how many queries are apart beyond rounding where none may be."""
    documents, prepare = index_vectors(saved, direction, scoring)
    query, document = direction.roles({"image": saved.image, "text": saved.text})
    pairs = saved.pairs if direction.query_side == "image" else saved.pairs.flip(1)
    k = min(args.k, len(documents))
    if scoring == "native":
        vectors = query, document, native_exponents(saved.metadata)
    else:
        vectors = prepare(query), documents, Normalization.DOT.exponents
    exact = rank(*vectors[:2], pairs, {scoring: vectors[2]}, top_k={scoring: k})[scoring]
    queries = prepare(query)[torch.from_numpy(exact.queries)]
    print(f"\n{direction.value} {scoring}: {len(documents):,} documents of {documents.shape[1]} numbers, "
          f"{len(queries):,} queries; success@1 {exact.top_relevant[:, 0].mean():.4f}")  # fmt: skip
    relevant = {(int(q), int(d)) for q, d in pairs.tolist()}
    failed = 0
    for name, strict, search in contestants(faiss, saved, direction, scoring, queries, args):
        ids = search(queries.numpy(), k)
        hit = np.mean([(int(q), int(top)) in relevant for q, top in zip(exact.queries, ids[:, 0], strict=True)])
        line = f"  {name:46} recall@{k} {recall_at_k(documents, queries, ids, k):.4f}  success@1 {hit:.4f}"
        if strict:
            different, beyond = apart(documents, queries, ids, exact)
            failed += beyond
            line += f"  apart {different}, beyond rounding {beyond}"
        print(line, flush=True)
    return failed


def contestants(
    faiss: Any, saved: Embeddings, direction: Direction, scoring: str, queries: Tensor, args: argparse.Namespace
) -> Iterator[tuple[str, bool, Search]]:
    """(name, whether it must be exact, search): queries are the inner product's; each makes of them what it needs."""
    documents, _ = index_vectors(saved, direction, scoring)
    dim, inner = documents.shape[1], faiss.METRIC_INNER_PRODUCT

    def filled(index: Any, rows: Tensor) -> Any:
        if not index.is_trained:
            index.train(rows.numpy())
        index.add(rows.numpy())
        return index

    def hnsw(rows: Tensor) -> Any:
        index = faiss.IndexHNSWFlat(rows.shape[1], LINKS, inner)
        index.hnsw.efConstruction, index.hnsw.efSearch = EF_CONSTRUCTION, args.ef_search
        return filled(index, rows)

    def search(index: Any, queries: Tensor | None = None) -> Search:
        return lambda q, k: index.search(q if queries is None else queries.numpy(), k)[1]

    yield "flat, inner product", True, search(filled(faiss.IndexFlatIP(dim), documents))
    unit = filled(faiss.IndexFlatIP(dim), normalize(documents, 1.0))
    yield "flat, normalized (a cosine metric)", False, search(unit)

    augmented, augment = norm_augmentation(documents)
    unit_queries = normalize(augment(queries), 1.0)  # as an engine that normalizes both would
    cosine = filled(faiss.IndexFlatIP(dim + 1), normalize(augmented, 1.0))
    yield "flat, normalized, norm augmentation", True, search(cosine, unit_queries)

    setting = f"HNSW M {LINKS}, ef {EF_CONSTRUCTION}/{args.ef_search}"
    yield f"{setting}, inner product", False, search(hnsw(documents))
    yield f"{setting}, augmentation", False, search(hnsw(augmented), unit_queries)
    if scoring == "corrected":
        raw, _ = index_vectors(saved, direction, scoring, zero_point=0.0)
        yield f"{setting}, not centred", False, search(hnsw(raw))

    kinds = faiss.ScalarQuantizer
    for name, kind in (("a range for each dimension", kinds.QT_8bit), ("one range for all", kinds.QT_8bit_uniform)):
        index = filled(faiss.IndexScalarQuantizer(dim, kind, inner), documents)
        yield f"int8, {name}", False, search(index)


def apart(documents: Tensor, queries: Tensor, ids: Array, exact: Ranking) -> tuple[int, int]:
    """How many lists differ from the exact ones, and how many of them in their scores, too."""
    rows = np.flatnonzero((ids != exact.top_ids).any(axis=1))
    room = ROUNDING * magnitude(queries.double()) * magnitude(documents.double()).max()
    beyond = 0
    for row in rows:
        scores = [documents[torch.from_numpy(x[row])].double() @ queries[row].double() for x in (ids, exact.top_ids)]
        beyond += bool((scores[0] - scores[1]).abs().max() > room[row])
    return len(rows), beyond


def planted(images: int, dim: int) -> Embeddings:
    """Embeddings of an asym-i2t/qnorm model: clear captions have larger norms, and each image adds an offset of its own
    to all of its scores, which no i2t loss constrains."""
    generator = torch.Generator().manual_seed(0)
    image = torch.nn.functional.normalize(torch.randn(images, dim - 1, generator=generator), dim=1)
    clear = torch.rand(images, CAPTIONS, 1, generator=generator)
    noise = torch.randn(images, CAPTIONS, dim - 1, generator=generator) / dim**0.5
    text = (image.unsqueeze(1) + (2 - clear) * noise) * (0.5 + clear)
    offset = 0.4 * torch.randn(images, 1, generator=generator)
    image = torch.cat([image, offset], dim=1)
    text = torch.cat([text, torch.ones(images, CAPTIONS, 1)], dim=2).flatten(0, 1)
    facts = {"loss": "asym-i2t", "gamma_q": 1.0, "gamma_d": 0.0, "logit_scale_i2t": 10.0, "logit_scale_t2i": None}
    texts, half = torch.arange(len(text)), len(text) // 2  # the first half is the bank, the second is evaluated
    first = images - images // 2
    kept = texts[first * CAPTIONS :]
    owner = kept // CAPTIONS
    return Embeddings(
        image,
        text[kept],
        torch.stack([owner, torch.arange(len(kept))], dim=1),
        [f"i{row}" for row in range(images)],
        owner=owner.tolist(),
        evidence={"t2i": document_offsets(image, text[:half], native_exponents(facts), 10.0)},
        model="planted",
        metadata=facts,
        alpha={"i2t": 10.0},
    )


if __name__ == "__main__":
    sys.exit(main())
