"""Whether the loss is the plain one, in float64 and with all of its gradients (benchmarks/loss.py asks)."""

from __future__ import annotations

from typing import Any

import torch
from harness import Json
from loss_step import features

from mmclip.losses import clip_loss, contrastive_cross_entropy, mask_from_ids
from mmclip.roles import Positives
from mmclip.similarity import Similarity


def agreement(spec: Json) -> Json:
    """The largest relative difference from the plain form in float64, and of what: values and all gradients."""
    rows, dim = spec["batch"], spec["dim"]
    gen = torch.Generator().manual_seed(1)
    ids = [torch.randint(most, (rows,), generator=gen) for most in (max(rows // 3, 1), 2 * rows)]
    known = (ids[0][:, None] == ids[0]) | (ids[1][:, None] == ids[1])
    worst, what, compared = 0.0, "", 0
    for loss in spec["losses"]:
        for norm in spec["norms"]:
            for policy in Positives:
                x, y = features(rows, dim, torch.float64, "cpu")
                ours = clip_loss(loss, norm, positives=policy).double()
                out = ours({"image": x, "text": y}, mask_from_ids(*ids))
                out.loss.backward()
                plain = Similarity(norm).double()
                plain.load_state_dict(ours.similarity.state_dict())  # alpha as its first batch set it
                u, v = (t.detach().clone().requires_grad_() for t in (x, y))
                value = torch.zeros((), dtype=torch.float64)
                pairs: list[tuple[str, Any, Any]] = []
                for direction, weight in ours.weights.items():
                    scores = plain(direction, *direction.roles({"image": u, "text": v}))
                    one = contrastive_cross_entropy(scores, known, policy)
                    value = value + weight * one
                    pairs.append((f"{direction.value} alone", out.by_direction[direction], one))
                value.backward()
                pairs += [("value", out.loss, value), ("image", x.grad, u.grad), ("text", y.grad, v.grad)]
                theirs = dict(plain.named_parameters())
                pairs += [(n, p.grad, theirs[n].grad) for n, p in ours.similarity.named_parameters() if p.requires_grad]
                for name, a, b in pairs:
                    apart = float((a - b).detach().abs().max() / b.detach().abs().max())
                    compared += 1
                    if not apart <= worst and worst == worst:  # the first NaN stays
                        worst, what = apart, f"{name} of {loss}/{norm}/{policy.value}"
    return {"worst": worst, "what": what, "compared": compared}
