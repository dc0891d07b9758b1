"""Training on scored pairs with the paper's squared error, from the one similarity, and the split that it needs.

    loss = mean_i (s(q_i, d_i) - label_i)**2,   s(q, d) = alpha q . d / (|q|**gamma_q |d|**gamma_d)

(Feng & Watanabe 2026, which takes alpha = 0.01.) sentence1 is the query, sentence2 the document. alpha is never
trained: it is a number, or what brings the effective scale of the first batch to a given value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmclip.config import StsConfig
from mmclip.config.text import AUTO, PAPER_SCALE
from mmclip.errors import UserError, printable
from mmclip.models.text_encoder import ROLES, TextEncoder
from mmclip.similarity import Direction, Normalization, Similarity, magnitude
from mmclip.tasks.sts import StsPairs, pair_scores, require_order, same_sentence
from mmclip.training.optimizer import cosine_factor, set_learning_rate, warmup_steps

Array = NDArray[Any]
Vectors = tuple[Tensor, Tensor]  # raw vectors [P, D] of sentence1 and of sentence2


class RoleMSELoss(nn.Module):
    """Squared error of the role similarity: a loss for SentenceTransformerTrainer, on two columns and a label.

    model   a SentenceTransformer whose vectors are raw; a final Normalize module is refused but for cosine
    norm    one of the five; learned trains both gammas (give them a learning rate of their own, if you can)
    scale   alpha; None: 1 for cosine, whose scores lie in -1 to 1 as they are, else 0.01, the paper's; "auto": alpha is
            set on the first batch so that the effective scale, alpha times the mean lengths kept, is effective_scale

    Labels lie in 0 to 1 (a 0 to 5 score divided by 5). Errors: ValueError.
    """

    def __init__(
        self,
        model: Any,
        norm: Normalization | str = Normalization.COSINE,
        scale: float | str | None = None,
        effective_scale: float = 1.0,
        gamma_init: float = 0.5,
    ) -> None:
        super().__init__()
        norm = Normalization(norm)
        if scale is None:
            scale = 1.0 if norm is Normalization.COSINE else PAPER_SCALE
        number = math.inf if isinstance(scale, str) else scale
        if scale != AUTO and not 0 < number < math.inf:
            raise ValueError(f"scale {printable(scale, 60)!r} is neither a number above 0 nor {AUTO!r}")
        if norm is not Normalization.COSINE and type(model[len(model) - 1]).__name__ == "Normalize":
            raise ValueError(f"norm {norm.value!r} needs raw vectors: take the model's final Normalize module off")
        self.model = model
        self.asked = scale
        self.similarity = Similarity(norm, (Direction.Q2D,), effective_scale, effective_scale, gamma_init)
        logit_scale = self.similarity.logit_scale(Direction.Q2D).requires_grad_(False)
        if scale != AUTO:
            logit_scale.fill_(math.log(number))

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        query, document = (self.model(features)["sentence_embedding"] for features in sentence_features)
        return self.of_vectors(query, document, labels)

    def of_vectors(self, query: Tensor, document: Tensor, labels: Tensor) -> Tensor:
        """The loss of raw vectors [B, D] with labels [B], 0-d."""
        if self.asked == AUTO and self.training and not self.similarity.has_norm_stats(Direction.Q2D):
            self.similarity.update_norm_stats(Direction.Q2D, magnitude(query), magnitude(document))
        s = pair_scores(query, document, self.similarity.exponents, self.similarity.scale(Direction.Q2D))
        return nn.functional.mse_loss(s, labels.to(s))

    @property
    def alpha(self) -> float:
        return float(self.similarity.scale(Direction.Q2D))

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of it."""
        return {"norm": self.similarity.norm.value, "scale": self.asked, "effective_scale": self.similarity.scale_init}


class ResidualHead(nn.Module):
    """x + f(x) on raw vectors [N, D], f of one hidden layer, with zeros in its last: at first it changes nothing.

    An encoder's final linear layer alone cannot set the length of a vector apart from its direction.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        for parameter in self.layers[2].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)

    @torch.no_grad()
    def transform(self, vectors: Vectors) -> Vectors:
        """Vectors of both sides through the head, by way of float32, in the precision that they came in."""
        first, second = vectors
        return self(first.float()).to(first), self(second.float()).to(second)


def label_top(scores: Array) -> float:
    """What a file's scores are divided by to be labels: the top of the range that they seem to be of.

    >>> label_top(np.array([0.0, 0.8])), label_top(np.array([0.0, 4.2])), label_top(np.array([0.0, 10.0]))
    (1.0, 5.0, 10.0)
    """
    top = float(np.max(np.abs(scores)))
    return next((limit for limit in (1.0, 5.0) if top <= limit), top)


def split_pairs(pairs: StsPairs, share: float, seed: int) -> tuple[StsPairs, StsPairs]:
    """(train, held out): whole groups of pairs that share sentences, drawn until ``share`` of the pairs is held out.

    Errors: UserError where one of them has too few pairs, or no order.
    """
    order = np.random.default_rng(seed).permutation(pairs.groups.max() + 1)
    sizes = np.bincount(pairs.groups)[order]
    enough = int(np.searchsorted(np.cumsum(sizes), share * len(pairs))) + 1
    held = np.isin(pairs.groups, order[:enough])
    parts = pairs.take(np.flatnonzero(~held)), pairs.take(np.flatnonzero(held))
    for name, part in zip(("to train on", "held out"), parts, strict=True):
        require_order(part, f"--holdout {share:g} of {printable(pairs.path)}: {name}")
    return parts


def without_sentences_of(pairs: StsPairs, others: StsPairs) -> StsPairs:
    """The pairs that share no sentence with the pairs of another file."""
    known = {same_sentence(s) for s in others.first + others.second}
    rows = [i for i, two in enumerate(zip(pairs.first, pairs.second, strict=True))
            if not known & {same_sentence(s) for s in two}]  # fmt: skip
    kept = pairs.take(np.array(rows, dtype=np.int64))
    if left := len(pairs) - len(kept):
        kept.notes.append(f"{left} training pairs left out: a sentence of theirs is in {printable(others.path)}")
    require_order(kept, f"{printable(pairs.path)} without the sentences of {printable(others.path)}")
    return kept


def train_pairs(
    model: TextEncoder,
    norm: str,
    pairs: StsPairs,
    settings: StsConfig,
    seed: int,
    vectors: Vectors | None = None,
) -> tuple[RoleMSELoss, ResidualHead | None, list[float]]:
    """Train a model in place, on the batches that ``seed`` draws (the same for every norm): (loss, head, the loss of
    every step).

    vectors: raw [P, D] of both sides, where a head on them is trained instead of the model; else the head is None.
    Errors: UserError where the loss is not finite.
    """
    encoder = model.encoder
    total = settings.epochs * math.ceil(len(pairs) / settings.batch_size)
    warmup = warmup_steps(settings.warmup, total)
    device = encoder.device
    bf16 = model.precision != "fp32"
    labels = torch.tensor(pairs.scores / label_top(pairs.scores), dtype=torch.float32, device=device)
    order = torch.Generator().manual_seed(seed)
    history: list[float] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)  # the head, dropout
        head = None if vectors is None else ResidualHead(model.dim).to(device)
        loss = RoleMSELoss(encoder, norm, settings.scale, settings.effective_scale, settings.gamma_init).to(device)
        optimizer = _optimizer(encoder if head is None else head, loss, settings)
        loss.train()
        for _ in range(settings.epochs):
            for rows in torch.randperm(len(pairs), generator=order).split(settings.batch_size):
                set_learning_rate(optimizer, cosine_factor(len(history), warmup, total))
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                    goal = labels[rows.to(device)]
                    if head is None or vectors is None:
                        value = loss(_features(model, pairs, rows.tolist()), goal)
                    else:
                        query, document = (head(v[rows].to(labels)) for v in vectors)
                        value = loss.of_vectors(query, document, goal)
                if not value.isfinite():
                    raise UserError(f"--norms {norm}: the loss is not finite at step {len(history)}; a smaller --lr?")
                optimizer.zero_grad(set_to_none=True)
                value.backward()
                optimizer.step()
                history.append(value.item())
    loss.eval()
    return loss, head, history


def _optimizer(trained: nn.Module, loss: RoleMSELoss, settings: StsConfig) -> torch.optim.AdamW:
    """AdamW: decay on matrices alone, gamma with a learning rate of its own."""
    parameters = [p for p in trained.parameters() if p.requires_grad]
    gammas = [p for p in loss.similarity.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "peak_lr": settings.lr, "weight_decay": settings.wd},
        {"params": [p for p in parameters if p.ndim < 2], "peak_lr": settings.lr, "weight_decay": 0.0},
        {"params": gammas, "peak_lr": settings.gamma_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([{**g, "lr": g["peak_lr"]} for g in groups if g["params"]])


def _features(model: TextEncoder, pairs: StsPairs, rows: list[int]) -> list[dict[str, Tensor]]:
    """Tokens of both sides of some pairs, cut and prompted by role as TextEncoder.encode does."""
    encoder, found = model.encoder, []
    own = encoder.max_seq_length
    for role, side in zip(ROLES, (pairs.first, pairs.second), strict=True):
        encoder.max_seq_length = model.length_of(role)
        tokens = encoder.preprocess([side[i] for i in rows], prompt=model.prompts.get(role) or None)
        found.append({k: v.to(encoder.device) if isinstance(v, Tensor) else v for k, v in tokens.items()})
    encoder.max_seq_length = own
    return found
