"""Before the first step and after the last: start.json, the saved model, its evaluations.

start.json is a results.json of the untrained model on the first --val-data, what it finds on the others under
"evaluations", and beside it "fisher": the condition
numbers over pairs of the training data ("q2d"), and, told apart, over pairs of a title that asks for its text
("titles"), which a corpus has enough of where judged queries are few.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmclip.config import TextTrainConfig
from mmclip.data.beir import EVALUATIONS, BeirCollection, evaluation_name
from mmclip.data.text_pairs import TextPairs
from mmclip.errors import printable
from mmclip.evaluation.eval_set import text_set
from mmclip.evaluation.evaluate import evaluate
from mmclip.evaluation.results import START_FILE, json_text, save_results
from mmclip.io import write_text_atomically
from mmclip.metrics.fisher_report import PER_DIMENSION, fisher_report
from mmclip.metrics.rank import TEXT_RATES
from mmclip.models import metadata
from mmclip.models.export import export_text
from mmclip.models.metadata import text_metadata
from mmclip.models.text_encoder import TextEncoder, encoding
from mmclip.similarity import TINY, Direction, mean_length_factors
from mmclip.training.text_trainer import require_finite
from mmclip.training.text_training import Run, exponents_of

MODEL_FOLDER = "model"
Json = dict[str, Any]


class Evaluations:
    """Vectors of collections; documents that the one before had, too, as another split of a corpus has, are not encoded
    again."""

    def __init__(self, settings: TextTrainConfig, model: TextEncoder) -> None:
        self.settings, self.model = settings, model
        self.documents: list[str] = []
        self.vectors = torch.zeros(0, 0)

    def vectors_of(self, collection: BeirCollection) -> tuple[Tensor, Tensor]:
        """(queries [Q, D], documents [N, D]), raw."""
        batch = self.settings.encode_batch_size
        if self.documents != collection.documents:
            self.vectors = self.model.encode(collection.documents, "document", batch)
            self.documents = collection.documents
        return self.model.encode(collection.queries, "query", batch), self.vectors

    def forget(self) -> None:
        """The model has changed."""
        self.documents = []


def about(settings: TextTrainConfig, run: Run, pairs: TextPairs, steps: int) -> Json:
    """What both the model and its results say of the run: what is needed to repeat it and to score with it."""
    model = run.model
    return {
        "model": settings.model,
        **encoding(model),
        "seed": settings.seed,
        "steps": steps,
        "versions": metadata.versions(),
    }


def how_to_score(norm: str, gamma_d: float) -> str:
    """In words, for whoever finds the model."""
    if norm in ("cosine", "dnorm"):
        return "rank documents by cosine"
    if norm != "learned":
        return "rank documents by the dot product of raw vectors: their length is part of the score, so divide by none"
    return (
        f"rank documents by the dot product after each document's vector is divided by its length to the power of "
        f"{gamma_d:.4g}; the query's length changes no ranking"
    )


# --- before the first step --------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_start(run: Run, pairs: TextPairs, val: Sequence[BeirCollection], evaluations: Evaluations) -> None:
    """Write start.json; no weight is changed. A run that goes on after its first step keeps what it has."""
    path = run.folder / START_FILE
    if run.step or path.is_file():
        if not path.is_file():
            print(f"no {START_FILE}: --measure-start came after step {run.step}", file=sys.stderr)
        return
    settings, loss, native = run.settings, run.loss, exponents_of(run.loss)
    asked, answers, rows = _training_vectors(run, pairs)
    lengths = float(mean_length_factors(asked[rows[0]], answers[rows[1]], native).prod())
    alpha = settings.logit_scale_init / max(lengths, TINY)  # what a first batch of these would set
    trained = text_metadata(settings, loss.loss.similarity, loss.loss.trained)
    if Direction.Q2D in loss.loss.trained:
        trained["logit_scale_q2d"] = alpha
    known = about(settings, run, pairs, 0) | {"trained_with": trained}
    content: Json = {}
    for i, collection in enumerate(val):
        data = text_set(collection, *evaluations.vectors_of(collection))
        found = evaluate(
            [data],
            native,
            [Direction.Q2D],
            scales={Direction.Q2D: alpha},
            metrics=TEXT_RATES,
            fisher=i == 0,
            seed=settings.seed,
            metadata=known,
        ).json
        if i == 0:
            content = {**found, "evaluations": {}}
        else:
            kept = {key: found[key] for key in ("data", "retrieval", "magnitude")}
            content["evaluations"][evaluation_name(collection.path, collection.split)] = kept
    fisher: Json = {"data": {"path": settings.train_data, "split": settings.train_split}}
    fisher["q2d"] = fisher_report(asked, answers, rows, np.arange(len(asked)), native, alpha, seed=settings.seed)
    if val and (titles := _title_vectors(run, val[0])):
        each = np.arange(len(titles[0]))
        fisher["titles"] = {
            "data": _place(val[0]),
            "what": "a title asks for its text",
            **fisher_report(*titles, (each, each), each, native, alpha, seed=settings.seed),
        }
    write_text_atomically(path, json_text({**content, "fisher": fisher}, indent=1))
    print(f"before the first step: {printable(path)}", file=sys.stderr, flush=True)


def _training_vectors(run: Run, pairs: TextPairs) -> tuple[Tensor, Tensor, tuple[Any, Any]]:
    """Raw queries, raw documents, and (query rows, document rows) of random training pairs, as many as the Fisher
    report and its nulls have a use for."""
    dataset = pairs.dataset()
    most = 2 * PER_DIMENSION * run.model.dim
    rng = np.random.default_rng(run.settings.seed)
    chosen = np.sort(rng.choice(len(dataset), min(len(dataset), most), replace=False)).tolist()
    drawn = dataset.select(chosen)
    ids = np.array(drawn["label"])[:, :2]
    vectors, rows = [], []
    for role, column, of in (("query", "query", ids[:, 0]), ("document", "positive", ids[:, 1])):
        _, first, inverse = np.unique(of, return_index=True, return_inverse=True)
        texts = drawn.select(first.tolist())[column]
        vectors.append(run.model.encode(list(texts), role, run.settings.encode_batch_size))
        rows.append(inverse.reshape(-1))
    return vectors[0], vectors[1], (rows[0], rows[1])


def _title_vectors(run: Run, collection: BeirCollection) -> tuple[Tensor, Tensor] | None:
    """Titles as queries and their texts as documents; None where there are too few for a condition number."""
    rows, seen = [], set()
    for row, (title, document) in enumerate(zip(collection.titles, collection.documents, strict=True)):
        if title.strip() and title not in seen and document[len(title) :].strip():
            seen.add(title)
            rows.append(row)
    enough = PER_DIMENSION * run.model.dim
    if len(rows) < enough:
        return None
    chosen = np.sort(np.random.default_rng(run.settings.seed).permutation(rows)[: 2 * enough]).tolist()
    batch = run.settings.encode_batch_size
    texts = [collection.documents[row][len(collection.titles[row]) :].strip() for row in chosen]
    asked = run.model.encode([collection.titles[row] for row in chosen], "query", batch)
    return asked, run.model.encode(texts, "document", batch)


# --- after the last ---------------------------------------------------------------------------------------------------


def finish(run: Run, pairs: TextPairs, val: list[BeirCollection], evaluations: Evaluations) -> None:
    """Write model/, evaluate, write results.json and evaluations/. Rank 0 only."""
    require_finite(run.model.encoder, run.step)
    settings, native = run.settings, exponents_of(run.loss)
    seconds = run.seconds
    trained = text_metadata(settings, run.loss.loss.similarity, run.loss.loss.trained)
    known = about(settings, run, pairs, run.step)
    said = {
        **trained,
        **known,
        "scoring": how_to_score(settings.norm, trained["gamma_d"]),
        "data": {"path": settings.train_data, "split": settings.train_split, "n_pairs": len(pairs)},
    }
    run.trainer.accelerator.unwrap_model(run.trainer.model_wrapped, keep_fp32_wrapper=False)  # autocast ends here
    run.model.encoder.eval()
    export_text(run.folder / MODEL_FOLDER, run.model, said)
    print(f"model: {printable(run.folder / MODEL_FOLDER)} ({said['scoring']})", file=sys.stderr, flush=True)
    if not val:
        print("no evaluation data: give --val-data, or evaluate later with scripts/evaluate_text.py", file=sys.stderr)
    evaluations.forget()
    folders = [run.folder, *(run.folder / EVALUATIONS / evaluation_name(c.path, c.split) for c in val[1:])]
    # the run's own results.json comes last: it says that the run is finished
    for collection, folder in sorted(zip(val, folders, strict=False), key=lambda pair: pair[1] == run.folder):
        results = evaluate(
            [text_set(collection, *evaluations.vectors_of(collection))],
            native,
            [Direction.Q2D],
            scales={Direction.Q2D: trained["logit_scale_q2d"]},
            metrics=TEXT_RATES,
            seed=settings.seed,
            metadata={**known, "trained_with": trained, "seconds": seconds,
                      "alarms": {a.name: a.text for a in run.told}},
        )  # fmt: skip
        save_results(results, folder)
        _say(results.json, collection, folder)


def _say(content: Mapping[str, Any], collection: BeirCollection, folder: Path) -> None:
    """nDCG@10 of every scoring, natively and corrected, on one line each data set."""
    retrieval = content["retrieval"][Direction.Q2D.value]
    by = "  ".join(f"{name} {numbers['ndcg@10']:.4f}" for name, numbers in retrieval.items() if "ndcg@10" in numbers)
    print(f"{printable(collection.path)} [{printable(collection.split)}] nDCG@10: {by}")
    print(f"results: {printable(folder / 'results.json')}")


def _place(collection: BeirCollection) -> Json:
    return {"path": collection.path, "split": collection.split}
