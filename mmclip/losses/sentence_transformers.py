"""The directional loss inside sentence-transformers: a drop-in loss for SentenceTransformerTrainer.

Column 0 of a batch holds queries, column 1 the document of each, further columns hard negatives, which are candidates
of q2d only. Similarity, roles, scale and loss are mmclip.losses.contrastive.ContrastiveLoss; what is here brings it columns, ids,
ranks and sentence-transformers' gradient cache.

Ids of a batch are its labels, int [B, 2 + K]: query, document, and the document of each of K hard negatives, from 0 to
2**31 - 1. A known positive of a query is a document judged relevant to it (``relevant``), or paired with the same query
elsewhere in the batch; it may stand among any row's documents and negatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from torch import Tensor, nn

from mmclip import distributed
from mmclip.errors import UserError, printable
from mmclip.io import read_arrays, write_arrays
from mmclip.losses.contrastive import ContrastiveLoss
from mmclip.losses.positives import codes_of, known_by_id
from mmclip.roles import TEXT_DIRECTIONS, Direction, Normalization, Positives, direction_weights

LOSS_FILE = "mmclip_loss.safetensors"


class RoleRankingLoss(nn.Module):
    """ContrastiveLoss over the columns of a sentence-transformers batch.

    The first batch sets alpha so that the effective scale is ``scale_init``; from then on it is held, or learned with
    ``learn_scale``. Call ``clamp_scale`` after every optimizer step. With ``norm`` learned, give parameters that match
    "gamma_hat" a larger learning rate (``learning_rate_mapping``) and no weight decay. Evaluated, that is without
    gradients, it changes nothing of itself.

    Ranks: ``gather_across_devices`` makes the batches of all ranks one batch, with its exact gradients; otherwise each
    rank has candidates of its own. Either way lengths are observed over all ranks, and the gradients of alpha and
    gamma, which DistributedDataParallel does not hold, are averaged over ranks when backward reaches them.
    """

    relevant: Tensor

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[Direction, float] | None = None,
        norm: Normalization | str = Normalization.COSINE,
        positives: Positives | str = Positives.MASK,
        scale_init: float = 20.0,
        scale_max: float = 100.0,
        learn_scale: bool = False,
        gamma_init: float = 0.5,
        focal: float = 0.0,
        norm_drift: float = 0.0,
        relevant: Tensor | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        """weights: by direction, q2d alone by default. relevant: int [M, 2], (query id, document id) of every known
        judgment. Errors: UserError for other directions, no weight above 0, or ids that are none."""
        super().__init__()
        weights = direction_weights("q2d", text=True) if weights is None else dict(weights)
        if not set(weights) <= set(TEXT_DIRECTIONS) or not any(w > 0 for w in weights.values()):
            raise UserError(f"weights {dict(weights)}: a weight above 0 of q2d, d2q or both is expected")
        self.model = model
        self.loss = ContrastiveLoss(weights, norm, positives, scale_init, scale_max, gamma_init, focal, norm_drift)
        self.learn_scale, self.gamma_init, self.gather_across_devices = learn_scale, gamma_init, gather_across_devices
        if not learn_scale:
            for direction in self.loss.trained:
                self.loss.similarity.logit_scale(direction).requires_grad_(False)
        for parameter in self._own():
            parameter.register_post_accumulate_grad_hook(_average)
        self.register_buffer("relevant", codes_of(relevant), persistent=False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """sentence_features: of each column what the model takes, B rows each -> the loss, 0-d."""
        return self._value([self.model(c)["sentence_embedding"] for c in self._columns(sentence_features)], labels)

    def clamp_scale(self) -> None:
        """Bring every effective scale above ``scale_max`` back to it."""
        self.loss.similarity.clamp_()

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of the loss."""
        similarity = self.loss.similarity
        return {
            "weights": {d.value: w for d, w in self.loss.weights.items()},
            "norm": similarity.norm.value,
            "positives": self.loss.positives.value,
            "scale_init": similarity.scale_init,
            "scale_max": similarity.scale_max,
            "learn_scale": self.learn_scale,
            "gamma_init": self.gamma_init,
            "focal": self.loss.focal,
            "norm_drift": self.loss.norm_drift,
            "gather_across_devices": self.gather_across_devices,
        }

    def _own(self) -> list[nn.Parameter]:
        """What is trained beside the model: alpha and gamma."""
        return [p for p in self.loss.parameters() if p.requires_grad]

    def _columns(self, sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The columns that are read: hard negatives only where q2d is trained. Errors: UserError for one column."""
        columns = list(sentence_features)
        if len(columns) < 2:
            raise UserError(f"{len(columns)} text column: queries and their documents are expected, in this order")
        return columns if Direction.Q2D in self.loss.trained else columns[:2]

    def _value(self, rows: list[Tensor], labels: Tensor | None) -> Tensor:
        """The loss of the columns' raw rows, [B, D] each."""
        sides = {"query": rows[0], "document": rows[1]}
        extra = {"document": torch.cat(rows[2:])} if rows[2:] else {}
        ids = self._ids(labels, len(rows[0]), len(rows) - 2)
        if self.gather_across_devices:
            ids = [distributed.gather_ids(i) for i in ids]
        known = known_by_id(self.relevant, *ids) if ids else {}
        how = {"extra": extra, "untrained": False, "known": known, "across_ranks": self.gather_across_devices}
        if not torch.is_grad_enabled():  # the trainer evaluates with the loss in training mode
            before = {name: state.clone() for name, state in self.loss.state_dict().items()}
            value: Tensor = self.loss(sides, **how).loss
            self.loss.load_state_dict(before)
            return value
        mode = self.loss.training
        if distributed.world()[1] > 1 and not self.gather_across_devices:
            with torch.no_grad():  # what is remembered of lengths is of all ranks, or the ranks' alphas would part
                self.loss(sides, extra=extra, untrained=False, across_ranks=True)
            self.loss.eval()
        value = self.loss(sides, **how).loss
        self.loss.train(mode)
        return value

    def _ids(self, labels: Tensor | None, pairs: int, negatives: int) -> list[Tensor]:
        """[query ids [B], document ids [B], the negatives' [K * B] as their rows stand], or [] where there are none.

        Errors: UserError where judgments are known and the batch has no ids to find them by.
        """
        if self.loss.positives is Positives.NONE:
            return []
        width = 2 + negatives
        found = labels is not None and labels.ndim == 2 and not labels.is_floating_point() and len(labels) == pairs
        more = Direction.Q2D not in self.loss.trained  # no negative is read then, and its id stands there all the same
        if found and labels is not None and (labels.shape[1] == width or (more and labels.shape[1] > width)):
            return [labels[:, 0], labels[:, 1], labels[:, 2:width].T.reshape(-1)]
        if len(self.relevant):
            raise UserError(
                f"labels of shape {None if labels is None else list(labels.shape)}: judgments are known, so ids are "
                f"expected: whole numbers [{pairs}, {width}], the query's, the document's and each negative's"
            )
        return []


class CachedRoleRankingLoss(CachedLossMixin, RoleRankingLoss):
    """The same loss and gradients with ``mini_batch_size`` texts in the model at once, by sentence-transformers'
    gradient cache: the batch may be as large as its vectors allow, and texts are encoded twice."""

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
            loss = loss + (parameter - parameter.detach()) * gradient  # adds 0, and the gradient when backward is asked
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the mini-batches' vectors by column. ``with_backward`` puts their gradients in ``grad``, and
        keeps those of alpha and gamma until backward is asked for, where the trainer's factors reach them, too."""
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


def save_loss(loss: RoleRankingLoss, folder: str | Path) -> Path:
    """Write what the loss has learned and seen (alpha, gamma, running lengths) beside a checkpoint of the model, which
    the trainer saves without it. Errors: UserError."""
    path = Path(folder) / LOSS_FILE
    write_arrays(path, {name: value.cpu().numpy() for name, value in loss.loss.state_dict().items()})
    return path


def load_loss(loss: RoleRankingLoss, folder: str | Path) -> None:
    """Take back what ``save_loss`` wrote, exactly. Errors: UserError for a file of another loss, or none."""
    path = Path(folder) / LOSS_FILE
    state = loss.loss.state_dict()
    found = {name: torch.from_numpy(array) for name, array in read_arrays(path).items()}
    if {n: v.shape for n, v in found.items()} != {n: v.shape for n, v in state.items()}:
        raise UserError(
            f"{printable(path)}: the state of another loss: it has {printable(', '.join(sorted(found)))}; "
            f"{', '.join(sorted(state))} was expected"
        )
    loss.loss.load_state_dict(found)


@torch.no_grad()
def _average(parameter: Tensor) -> None:
    """Of a gradient that accumulates over several passes, what was there is equal on all ranks and stays as it is."""
    if parameter.grad is not None:
        distributed.average_([parameter.grad])
