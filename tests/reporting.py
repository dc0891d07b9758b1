"""Finished runs for the report's tests: planted embeddings, real pictures, and the lists that a report shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mmclip.evaluation import EvalData, Results, save_results
from mmclip.pools import make_pools
from mmclip.retrieval import rank_both_ways
from mmclip.similarity import CLIP_DIRECTIONS, Exponents, Normalization, magnitude, score

N, CAPTIONS, DIM = 40, 3, 16
QNORM, COSINE = Exponents(1.0, 0.0), Exponents(1.0, 1.0)


def planted(seed: int = 0, noise: float = 1.5, captions: list[str] | None = None) -> EvalData:
    """40 pictures with three captions each, 10 distractors a side; a caption of its picture is the longer, the better
    it fits."""
    gen = torch.Generator().manual_seed(seed)
    image = torch.randn(N, DIM, generator=gen)
    text = image.repeat_interleave(CAPTIONS, 0) + noise * torch.randn(N * CAPTIONS, DIM, generator=gen)
    return EvalData(
        image=image,
        text=text,
        pairs=torch.tensor([[t // CAPTIONS, t] for t in range(len(text))]),
        image_keys=[f"k{i:03}.png" for i in range(N)],
        captions=captions or [f"caption {t} of picture {t // CAPTIONS}" for t in range(len(text))],
        distractor_image=torch.randn(10, DIM, generator=gen),
        distractor_text=torch.randn(10, DIM, generator=gen),
    )


def add_lists(results: Results, data: EvalData, native: Exponents, folder: Path) -> Results:
    """The lists, lengths and items that a report shows, as an evaluation saves them."""
    scorings = {"cosine": Normalization.COSINE.exponents, "native": native}
    for pool in make_pools(data):
        ways = rank_both_ways(
            pool.vectors["image"], pool.vectors["text"], pool.pairs, scorings, top_k={"cosine": 10, "native": 10}
        )
        for direction, rankings in zip(CLIP_DIRECTIONS, ways, strict=True):
            query, document = direction.roles(pool.vectors)
            for name, ranking in rankings.items():
                prefix = f"{pool.name}/{direction.value}/{name}"
                results.per_query[f"{prefix}/top_ids"] = ranking.top_ids.astype(np.int32)
                results.per_query[f"{prefix}/top_relevant"] = ranking.top_relevant
            cosine = rankings["cosine"]
            scores = np.take_along_axis(
                score(query[torch.as_tensor(cosine.queries)], document, COSINE).numpy(), cosine.top_ids, axis=1
            )
            results.per_query[f"{pool.name}/{direction.value}/cosine/top_scores"] = scores.astype(np.float32)
        for side, x in pool.vectors.items():
            results.per_query[f"{pool.name}/lengths/{side}"] = magnitude(x).numpy().astype(np.float32)
    items = {"image_keys": data.image_keys, "captions": data.captions, "owner": data.owner}
    if items["owner"] is None:
        items["owner"] = data.pairs[data.pairs[:, 1].argsort(stable=True), 0].tolist()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "items.json").write_text(json.dumps(items), encoding="utf-8")
    save_results(results, folder)
    return results


def add_corrected(results: Results, **bank: object) -> None:
    """Scorings that exist in one direction only, t2i: "reversed", and "corrected" with the facts of its bank."""
    for pool, section in results.pools.items():
        scorings = section["retrieval"]["t2i"]
        for name, of in (("reversed", "dot"), ("corrected", "cosine")):
            scorings[name] = scorings[of] | (bank if name == "corrected" else {})
            prefix = f"{pool}/t2i/{of}/"
            for key in [k for k in results.per_query if k.startswith(prefix) and "/top_" not in k]:
                results.per_query[f"{pool}/t2i/{name}/{key.removeprefix(prefix)}"] = results.per_query[key]


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
