"""Training of a text encoder for retrieval: queries and documents as the two sides.

Optimizer, schedule and clipping are those of sentence-transformers' SentenceTransformerTrainer with its defaults, and a
run equals one of that trainer with :class:`mmclip.losses.sentence_transformers.RoleRankingLoss` on the same batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmclip import distributed
from mmclip.config import TextTrainConfig
from mmclip.data.beir import EVALUATIONS, BeirCollection, evaluation_name, folder_and_split, open_beir, require_beir
from mmclip.data.image_text import BadSample
from mmclip.data.text_pairs import TextPairs, hold_out
from mmclip.errors import UserError, printable
from mmclip.evaluation.eval_set import text_set
from mmclip.evaluation.evaluate import evaluate, quick_rates
from mmclip.evaluation.results import Results
from mmclip.losses import ContrastiveLoss, LossOutput, mask_from_judgments, text_loss
from mmclip.losses.positives import codes_of
from mmclip.metrics.fisher import PER_DIMENSION, fisher_report
from mmclip.metrics.rank import TEXT_RATES
from mmclip.models.export import export_text
from mmclip.models.metadata import text_metadata, versions
from mmclip.models.text_encoder import ROLES, TextEncoder, encoding, load_text_model
from mmclip.roles import Direction, Exponents, Positives
from mmclip.training.monitors import TEXT_ADVICE, BadSamples
from mmclip.training.optimizer import build_adamw, linear_factor, steps_in_all, text_groups
from mmclip.training.step import seed_of
from mmclip.training.task import Json, Task


@dataclasses.dataclass
class TextData:
    """Data of a text run, opened before its model loads."""

    pairs: TextPairs
    held_out: BeirCollection | None  # training queries of the validation
    val: list[BeirCollection]  # for the evaluation of the finished model; the first is the run's own


@dataclasses.dataclass
class TextBatch:
    """Pairs of one process in a step; their tokens are computed once."""

    pairs: TextPairs
    bad: list[BadSample] = dataclasses.field(default_factory=list)
    tokens: list[dict[str, Any]] | None = None

    @property
    def keys(self) -> list[str]:
        return self.pairs.queries

    def split(self, size: int, parts: int | None = None) -> list[TextBatch]:
        """Parts of at most ``size`` pairs, in order; or ``parts`` even ones."""
        n = len(self.pairs)
        bounds = [*range(0, n, size), n] if parts is None else [n * i // parts for i in range(parts + 1)]
        if len(bounds) == 2:
            return [self]
        return [TextBatch(self.pairs.subset(np.arange(*part))) for part in itertools.pairwise(bounds)]


class TextNetwork(nn.Module):
    """A sentence-transformers encoder over all columns of a batch in one forward pass, as DDP and FSDP need it."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, *columns: dict[str, Any]) -> tuple[Tensor, ...]:
        """Tokens of queries, documents and K columns of negatives -> raw [B, D], [B, D] and, for K > 0, [B, K, D]."""
        query, document, *negatives = [self.encoder(dict(column))["sentence_embedding"] for column in columns]
        return (query, document, torch.stack(negatives, dim=1)) if negatives else (query, document)


class TextTask(Task):
    """Training of one text encoder on pairs of queries and documents."""

    sides = ("query", "document")
    unit = "pairs"
    advice = TEXT_ADVICE
    metric = "ndcg@10"
    validates_last = True  # the held-out queries, which the evaluation does not have
    partial_gradients = True  # poolers that no pooling reads, experts that no text chose
    clips_loss = False

    config: TextTrainConfig
    model: TextEncoder

    @staticmethod
    def open_data(config: TextTrainConfig) -> TextData:
        """Raises: UserError: Whatever can be refused before a model loads."""
        places = [folder_and_split(text) for text in config.val_data or []]
        for root, split in places:
            require_beir(root, split)
        names = [evaluation_name(root, split) for root, split in places]
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise UserError(f"--val-data: {printable(twice)} is named twice; each needs a folder name of its own")
        pairs, held_out = hold_out(str(config.train_data), config.train_split, config.watch_queries, config.seed)
        if config.train_fraction < 1:
            pairs = pairs.take_fraction(config.train_fraction, config.seed)
        ranks = distributed.world()[1]
        if len(pairs) < config.batch_size * ranks:
            batch = f"--batch-size {config.batch_size}{f' on {ranks} processes' if ranks > 1 else ''}"
            few = f"there are only {len(pairs)} training pairs in {printable(config.train_data)}"
            raise UserError(f"{batch}: {few}; a smaller batch is needed")
        return TextData(pairs, held_out, [open_beir(root, split) for root, split in places])

    @staticmethod
    def load_model(config: TextTrainConfig, device: torch.device) -> TextEncoder:
        """The model of a config on a device."""
        torch.manual_seed(seed_of(config.seed))
        return load_text_model(config, device, config.keep_normalize)

    @staticmethod
    def trained(model: TextEncoder) -> tuple[nn.Module, set[str]]:
        """What is trained of a model, and the state-dict names of it that never change."""
        return model.encoder, set()

    @classmethod
    def open(cls, config: TextTrainConfig, data: TextData, model: TextEncoder, device: torch.device) -> TextTask:
        """The task of a run's data and model."""
        return cls(config, data, model, device)

    def __init__(self, config: TextTrainConfig, data: TextData, model: TextEncoder, device: torch.device) -> None:
        self.config, self.data, self.model, self.device = config, data, model, device
        self.precision, self.pairs, self.locked = model.precision, data.pairs, set()
        self.rank, ranks = distributed.world()
        self.encoder = self.network = TextNetwork(model.encoder)
        self.loss = build_loss(config).to(device)
        self.relevant = codes_of(torch.from_numpy(self.pairs.relevant)).to(device)
        # Negatives are candidates of q2d alone
        self.negatives = self.pairs.n_negatives if Direction.Q2D in self.loss.trained else 0
        self.outputs = (*self.sides, "negative") if self.negatives else self.sides
        self.accumulates = config.mini_batch_size is not None
        self.part_size = config.mini_batch_size or config.batch_size
        self.global_batch = config.batch_size * ranks
        self.candidates = self.global_batch * (1 + self.negatives) ** self.loss.weights[Direction.Q2D]
        self.steps_per_epoch = len(self.pairs) // self.global_batch
        self.total_steps = steps_in_all(config, self.steps_per_epoch)
        self.warmup = int(config.warmup) if config.warmup >= 1 else math.ceil(config.warmup * self.total_steps)
        self.val_steps = config.watch_steps or self.steps_per_epoch
        self.validation_queries = {Direction.Q2D.value: len(data.held_out.queries)} if data.held_out else {}
        self.bad_samples = BadSamples()
        texts = json.dumps([self.pairs.queries, self.pairs.documents, self.pairs.negatives]).encode()
        digest = hashlib.sha256(texts + np.ascontiguousarray(self.pairs.relevant).tobytes())
        self.fingerprints = {"data": digest.hexdigest()[:16]}
        self._encoded: tuple[list[str], Tensor] = ([], torch.zeros(0, 0))

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[TextBatch]:
        order = np.random.default_rng((self.config.seed, epoch)).permutation(len(self.pairs))
        for step in range(start_step, self.steps_per_epoch):
            start = step * self.global_batch + self.rank * self.config.batch_size
            yield TextBatch(self.pairs.subset(order[start : start + self.config.batch_size]))

    def inputs(self, batch: TextBatch) -> tuple[dict[str, Any], ...]:
        if batch.tokens is None:
            pairs = batch.pairs
            negatives = [[row[k] for row in pairs.negatives] for k in range(self.negatives)]
            columns = [(pairs.queries, "query"), *((texts, "document") for texts in (pairs.documents, *negatives))]
            batch.tokens = [self.model.tokens(texts, role) | {"task": role} for texts, role in columns]  # for a Router
        return tuple(
            {k: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in tokens.items()}
            for tokens in batch.tokens
        )

    def compute_loss(self, features: dict[str, Tensor], batch: TextBatch, log: bool) -> tuple[LossOutput, Json]:
        sides = {side: features[side] for side in self.sides}
        negatives, positives = {}, None
        if "negative" in features:
            negatives["document"] = features["negative"].transpose(0, 1).flatten(0, 1)  # [K * B, D], column by column
        if self.loss.positives is not Positives.NONE:
            ids = batch.pairs.query_ids, batch.pairs.document_ids
            query, document = (torch.from_numpy(x).to(self.device) for x in ids)
            negative = document[:, 1 : 1 + self.negatives].T.reshape(-1)
            positives = mask_from_judgments(self.relevant, query, document[:, 0], negative)
        return self.loss(sides, positives, negatives, untrained=False), {}

    def build_optimizer(self) -> torch.optim.AdamW:
        return build_adamw(text_groups(self.encoder, self.loss, self.config), (0.9, 0.999), 1e-8)

    def lr_factor(self, step: int) -> float:
        return linear_factor(step, self.warmup, self.total_steps)

    def checkpoint_gradients(self, enable: bool) -> None:
        encoder: Any = self.encoder.encoder
        (encoder.gradient_checkpointing_enable if enable else encoder.gradient_checkpointing_disable)()

    def use_copy(self, network: Any) -> None:
        self.network, self.model = network, dataclasses.replace(self.model, encoder=network.encoder)

    def _encode(self, texts: list[str], role: str, progress: bool = True) -> Tensor:
        return self.model.encode(texts, role, self.config.encode_batch_size, progress)

    def validate(self, exponents: Exponents) -> dict[str, float]:
        assert self.data.held_out is not None
        held_out = self.data.held_out
        vectors = [self._encode(held_out.queries, "query", False), self._encode(held_out.documents, "document", False)]
        return quick_rates(text_set(held_out, *vectors), exponents, [Direction.Q2D], ("ndcg@10", "success@1"))

    def introduction(self) -> list[str]:
        data, model = self.data, self.model
        watched = f"{len(data.held_out.queries)} queries held out and" if data.held_out else "no queries"
        lines = [f"{len(self.pairs):,} training pairs of {printable(self.config.train_data)}; {watched} watched"]
        lines += [printable(note) for note in self.pairs.notes]
        lines += [f"{printable(c.path)} [{printable(c.split)}]: {printable(n)}" for c in data.val for n in c.notes]
        if model.removed:
            norm = float(self._encode(self.pairs.documents[:64], "document", False).norm(dim=1).mean())
            removed = ", ".join(model.removed)
            lines.append(f"removed {removed}: embeddings are raw, mean norm of a document {norm:.3g}")
        return [*lines, f"texts cut to {', '.join(f'{model.length_of(role)} tokens ({role})' for role in ROLES)}"]

    def _metadata(self) -> Json:
        return text_metadata(self.config, self.loss.similarity, self.loss.trained)

    def _about(self, steps: int) -> Json:
        """What repeats the run and its encoding."""
        about = {"model": self.config.model, **encoding(self.model), "seed": self.config.seed, "steps": steps}
        return about | {"versions": versions()}

    def export(self, folder: Path, steps: int) -> str:
        trained, config = self._metadata(), self.config
        scoring = how_to_score(config.norm, trained["gamma_d"])
        data = {"path": config.train_data, "split": config.train_split, "n_pairs": len(self.pairs)}
        self.model.encoder.eval()
        export_text(folder, self.model, {**trained, **self._about(steps), "scoring": scoring, "data": data})
        return f" ({scoring})"

    def evaluate(self, steps: int, seconds: float) -> Iterator[tuple[str, Results]]:
        self._encoded = ([], torch.zeros(0, 0))  # the model has changed
        trained = self._metadata()
        about = {**self._about(steps), "trained_with": trained, "seconds": seconds}
        for i, collection in sorted(enumerate(self.data.val), key=lambda pair: pair[0] == 0):  # the run's own last
            folder = f"{EVALUATIONS}/{evaluation_name(collection.path, collection.split)}" if i else ""
            yield folder, self._evaluate(collection, trained["logit_scale_q2d"], about)

    def _evaluate(self, collection: BeirCollection, alpha: float | None, about: Json, fisher: bool = False) -> Results:
        data, q2d = text_set(collection, *self._embed(collection)), Direction.Q2D
        how: Json = {"scales": {q2d: alpha}, "metrics": TEXT_RATES, "fisher": fisher, "seed": self.config.seed}
        return evaluate([data], self._exponents(), [q2d], metadata=about, **how)

    @torch.no_grad()
    def _exponents(self) -> Exponents:
        return Exponents(*(float(g) for g in self.loss.similarity.exponents))

    def _embed(self, collection: BeirCollection) -> tuple[Tensor, Tensor]:
        """Raw queries [Q, D] and documents [N, D]; the last collection's documents, as of another split, are kept."""
        if self._encoded[0] != collection.documents:
            self._encoded = collection.documents, self._encode(collection.documents, "document")
        return self._encode(collection.queries, "query"), self._encoded[1]

    @torch.no_grad()
    def baseline(self) -> Json:
        """start.json: results.json of the untrained model on the first --val-data, the others under "evaluations", and
        Fisher condition numbers of training pairs ("q2d") and of titles as queries of their texts ("titles"), which a
        corpus has enough of where judged queries are few.
        """
        config, native, val = self.config, self._exponents(), self.data.val
        query, document, rows = self._training_pairs()
        alpha = self.first_alpha(Direction.Q2D, query[rows[0]], document[rows[1]])
        trained = self._metadata() | ({"logit_scale_q2d": alpha} if Direction.Q2D in self.loss.trained else {})
        about = self._about(0) | {"trained_with": trained}
        results = [self._evaluate(collection, alpha, about, fisher=i == 0).json for i, collection in enumerate(val)]
        content: Json = {**results[0], "evaluations": {}} if results else {}
        for collection, result in zip(val[1:], results[1:], strict=True):
            kept = {key: result[key] for key in ("data", "retrieval", "magnitude")}
            content["evaluations"][evaluation_name(collection.path, collection.split)] = kept
        fisher: Json = {"data": {"path": config.train_data, "split": config.train_split}}
        fisher["q2d"] = fisher_report(query, document, rows, np.arange(len(query)), native, alpha, seed=config.seed)
        if val and (titles := self._titles(val[0])):
            each = np.arange(len(titles[0]))
            report = fisher_report(*titles, (each, each), each, native, alpha, seed=config.seed)
            data = {"path": val[0].path, "split": val[0].split}
            fisher["titles"] = {"data": data, "what": "a title asks for its text", **report}
        return {**content, "fisher": fisher}

    def _training_pairs(self) -> tuple[Tensor, Tensor, tuple[Any, Any]]:
        """Raw queries, raw documents, and (query rows, document rows) of random pairs, each text encoded once.

        As many as the Fisher report and its nulls can use.
        """
        enough = min(len(self.pairs), 2 * PER_DIMENSION * self.model.dim)
        rng = np.random.default_rng(self.config.seed)
        drawn = self.pairs.subset(np.sort(rng.choice(len(self.pairs), enough, replace=False)))

        def encoded(role: str, texts: list[str], ids: Any) -> tuple[Tensor, Any]:
            _, first, rows = np.unique(ids, return_index=True, return_inverse=True)
            return self._encode([texts[i] for i in first], role), rows.reshape(-1)

        query, query_rows = encoded("query", drawn.queries, drawn.query_ids)
        document, document_rows = encoded("document", drawn.documents, drawn.document_ids[:, 0])
        return query, document, (query_rows, document_rows)

    def _titles(self, collection: BeirCollection) -> tuple[Tensor, Tensor] | None:
        """Titles as queries and their texts as documents; None where there are too few for a condition number."""
        texts: dict[str, str] = {}
        for title, document in zip(collection.titles, collection.documents, strict=True):
            if title.strip() and (text := document[len(title) :].strip()):
                texts.setdefault(title, text)
        enough = PER_DIMENSION * self.model.dim
        if len(texts) < enough:
            return None
        chosen = np.sort(np.random.default_rng(self.config.seed).permutation(len(texts))[: 2 * enough])
        pairs = [list(texts.items())[i] for i in chosen]
        return self._encode([title for title, _ in pairs], "query"), self._encode(
            [text for _, text in pairs], "document"
        )


def build_loss(config: TextTrainConfig) -> ContrastiveLoss:
    """The loss of a run; alpha is trained with --learn-scale only."""
    names = ("loss", "norm", "q2d_weight", "positives", "focal", "norm_drift", "gamma_init", "learn_scale")
    same = {name: getattr(config, name) for name in names}
    return text_loss(**same, gather=True, scale_init=config.logit_scale_init, scale_max=config.logit_scale_max)


def how_to_score(norm: str, gamma_d: float) -> str:
    """How to rank with a trained model, in words.

    >>> how_to_score("cosine", 1.0)
    'rank documents by cosine'
    """
    if norm in ("cosine", "dnorm"):  # their ranking depends on angles alone
        return "rank documents by cosine"
    dot = "rank documents by the dot product"
    if norm != "learned":
        return f"{dot} of raw embeddings: their norm is part of the score, so keep it"
    power = f"each document's embedding is divided by its norm to the power of {gamma_d:.4g}"
    return f"{dot} after {power}; the query's norm changes no ranking"
