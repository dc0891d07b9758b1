"""The directional loss inside sentence-transformers: a drop-in loss for SentenceTransformerTrainer.

Column 0 of a batch holds queries, column 1 the document of each, further columns hard negatives, which are candidates
of q2d only. ``ContrastiveLoss`` is connected here to columns, ids, ranks and sentence-transformers' gradient cache.

Ids of a batch are its labels, int [B, 2 + K]: query, document, and the document of each of K hard negatives, from 0 to
2**31 - 1. A known positive of a query is a document judged relevant to it (``relevant``), or paired with the same query
elsewhere in the batch; it may stand among any row's documents and negatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from torch import Tensor, nn

from mmclip import distributed
from mmclip.errors import UserError
from mmclip.losses.contrastive import TEXT_SCALE_INIT, ContrastiveLoss
from mmclip.losses.positives import PositiveMask, codes_of, mask_from_judgments
from mmclip.roles import SCALE_MAX, TEXT_DIRECTIONS, Direction, Normalization, Positives, direction_weights
from mmclip.similarity import Similarity


class RoleRankingLoss(nn.Module):
    """ContrastiveLoss over the columns of a sentence-transformers batch.

    The first batch sets alpha so that the effective scale is ``scale_init``; then it is held, or learned with
    ``learn_scale``. Call ``clamp_logit_scale`` after every optimizer step. With ``norm`` learned, give parameters that
    match "gamma_hat" a larger learning rate (``learning_rate_mapping``) and no weight decay. A forward pass without
    gradients leaves the loss unchanged.

    Ranks: ``gather_across_devices`` makes their batches one, with its exact gradients; otherwise each has candidates of
    its own. Either way norm statistics are those of all ranks, and the gradients of alpha and gamma, which
    DistributedDataParallel does not hold, are averaged over ranks when backward reaches them.
    """

    relevant: Tensor

    def __init__(
        self,
        model: nn.Module, weights: Mapping[Direction, float] | None = None,
        norm: Normalization | str = Normalization.COSINE, positives: Positives | str = Positives.MASK,
        scale_init: float = TEXT_SCALE_INIT, scale_max: float = SCALE_MAX, learn_scale: bool = False,
        gamma_init: float = 0.5, focal: float = 0.0, norm_drift: float = 0.0, relevant: Tensor | None = None,
        gather_across_devices: bool = False,
    ) -> None:  # fmt: skip
        """Make the loss of a model, features -> {"sentence_embedding": [B, D]}.

        Args:
            weights: by direction; q2d alone by default.
            relevant: int [M, 2], (query id, document id) of all known judgments.
            gather_across_devices: whether the ranks' batches are one.

        Other arguments are those of ``ContrastiveLoss`` and ``Similarity``. UserError for other directions, no weight
        above 0, or bad ids.
        """
        super().__init__()
        weights = direction_weights("q2d", text=True) if weights is None else dict(weights)
        if not set(weights) <= set(TEXT_DIRECTIONS) or not any(w > 0 for w in weights.values()):
            raise UserError(f"weights {dict(weights)}: a weight above 0 of q2d, d2q or both is expected")
        self.model, self.gamma_init, self.gather_across_devices = model, gamma_init, gather_across_devices
        similarity = Similarity(norm, weights, scale_init, scale_max, gamma_init, learn_scale=learn_scale)
        self.loss = ContrastiveLoss(similarity, weights, positives, focal, norm_drift, gather=gather_across_devices)
        for parameter in self._own():
            parameter.register_post_accumulate_grad_hook(_average)
        self.register_buffer("relevant", codes_of(relevant), persistent=False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Loss of a batch, 0-d, of the model's input of each column, B rows each, with ids, int [B, 2 + K]."""
        return self._value([self.model(c)["sentence_embedding"] for c in self._columns(sentence_features)], labels)

    def clamp_logit_scale(self) -> None:
        """Bring every effective scale above ``scale_max`` back to it."""
        self.loss.similarity.clamp_logit_scale()

    def get_config_dict(self) -> dict[str, Any]:
        """The loss's settings for a model card."""
        loss, similarity = self.loss, self.loss.similarity
        settings: dict[str, Any] = {"weights": {d.value: w for d, w in loss.weights.items()}}
        settings |= {"norm": similarity.norm.value, "positives": loss.positives.value}
        settings |= {name: getattr(similarity, name) for name in ("scale_init", "scale_max", "learn_scale")}
        settings |= {"gamma_init": self.gamma_init, "focal": loss.focal, "norm_drift": loss.norm_drift}
        return settings | {"gather_across_devices": self.gather_across_devices}

    def _own(self) -> list[nn.Parameter]:
        """Trained parameters beside the model: alpha and gamma."""
        return [p for p in self.loss.parameters() if p.requires_grad]

    def _columns(self, sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The columns to encode: hard negatives only where q2d is trained."""
        columns = list(sentence_features)
        if len(columns) < 2:
            raise UserError(f"{len(columns)} text column: queries and their documents are expected, in this order")
        return columns if Direction.Q2D in self.loss.trained else columns[:2]

    def _value(self, rows: list[Tensor], labels: Tensor | None) -> Tensor:
        """Loss of the columns' raw features, [B, D] each."""
        features = {"query": rows[0], "document": rows[1]}
        negatives = {"document": torch.cat(rows[2:])} if rows[2:] else {}
        positives = self._positives(labels, len(rows[0]), len(rows) - 2)
        if not torch.is_grad_enabled():  # the trainer evaluates with the loss in training mode
            before = {name: state.clone() for name, state in self.loss.state_dict().items()}
            value: Tensor = self.loss(features, positives, negatives, untrained=False).loss
            self.loss.load_state_dict(before)
            return value
        mode = self.loss.training
        if distributed.world()[1] > 1 and not self.gather_across_devices:
            self.loss.gather = True
            with torch.no_grad():  # norm statistics are those of all ranks, or the ranks' alphas would diverge
                self.loss(features, negatives=negatives, untrained=False)
            self.loss.gather = False
            self.loss.eval()
        value = self.loss(features, positives, negatives, untrained=False).loss
        self.loss.train(mode)
        return value

    def _positives(self, labels: Tensor | None, pairs: int, negatives: int) -> PositiveMask | None:
        """Known positives of a batch by its ids; None without ids (UserError where judgments are known)."""
        if self.loss.positives is Positives.NONE:
            return None
        width, shape = 2 + negatives, [] if labels is None else list(labels.shape)
        if labels is not None and len(shape) == 2 and not labels.is_floating_point() and len(labels) == pairs:
            surplus = Direction.Q2D not in self.loss.trained  # then the ids of negatives are there, but no negatives
            if shape[1] == width or (surplus and shape[1] > width):
                return mask_from_judgments(self.relevant, labels[:, 0], labels[:, 1], labels[:, 2:width].T.reshape(-1))
        if len(self.relevant):
            ids = f"whole numbers [{pairs}, {width}], the query's, the document's and each negative's"
            raise UserError(f"labels of shape {shape}: judgments are known, so ids are expected: {ids}")
        return None


class CachedRoleRankingLoss(CachedLossMixin, RoleRankingLoss):
    """The same loss and gradients with ``mini_batch_size`` texts in the model at once, by gradient caching.

    Texts are encoded twice, and only a batch's features must fit into memory.
    """

    def __init__(self, model: nn.Module, *arguments: Any, mini_batch_size: int = 32, **settings: Any) -> None:
        super().__init__(model, *arguments, **settings)
        if has_static_embedding_input(model):
            raise UserError("a static embedding's inputs have no rows, so its gradients cannot be cached")
        self.mini_batch_size = mini_batch_size
        self._gradients: list[Tensor] = []  # of alpha and gamma, between the loss and its backward pass

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """See RoleRankingLoss."""
        loss: Tensor = self.forward_cached(self._columns(sentence_features), labels)  # type: ignore[operator]
        gradients, self._gradients = self._gradients, []
        for parameter, gradient in zip(self._own(), gradients, strict=False):  # none without backward
            loss = loss + (parameter - parameter.detach()) * gradient  # adds 0, and the gradient in backward
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Loss of the mini-batches' features by column.

        ``with_backward`` writes their gradients to ``grad``; those of alpha and gamma wait for the trainer's factors.
        """
        value = self._value([torch.cat(parts) for parts in reps], labels)
        if not with_backward:
            return value
        rows = [part for parts in reps for part in parts]
        gradients = torch.autograd.grad(value, [*rows, *self._own()])
        for part, gradient in zip(rows, gradients, strict=False):
            part.grad = gradient
        self._gradients = list(gradients[len(rows) :])
        return value.detach()

    def get_config_dict(self) -> dict[str, Any]:
        """See RoleRankingLoss."""
        return super().get_config_dict() | {"mini_batch_size": self.mini_batch_size}


@torch.no_grad()
def _average(parameter: Tensor) -> None:
    """Average a gradient over ranks; what earlier passes accumulated is equal on all ranks, so it stays."""
    if parameter.grad is not None:
        distributed.average_([parameter.grad])
