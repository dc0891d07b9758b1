"""Scores for a judge that takes cosines only: embeddings whose cosines rank as a scoring of mmclip does.

A query ranks documents by (q . d) / |d|**gamma_d. Images are the documents of one direction and texts those of the
other, so both sides are divided by their own length**gamma_d: for one query its own factor is constant, and one pair of
embeddings ranks rightly in both directions. What is left of the lengths passes a judge that normalizes both sides, as
clip-benchmark does, in two more numbers,

    image  [i, sqrt(M**2 - |i|**2), 0]        text  [t, 0, sqrt(M**2 - |t|**2)]

whose cosine is i . t / M**2. M is far above any length: both roots are M in float32, so normalizing divides by a power
of two, which is exact. With gamma_d = 1 raw features go out, and every number is the judge's own.

**Classification**: an image is the query and a class the document. The class vector is the mean of its templates'
t / |t|**gamma_d. clip-benchmark normalizes that mean once more. With gamma_d = 1 this is its own class vector; with
lengths it changes nothing, because in float32 a mean of such embeddings has the length M, too. Where images have
several labels, clip-benchmark ranks images for each class: the class asks, and an image's length counts.

The two numbers are those of Neyshabur & Srebro 2015 (arXiv 1410.5518), here on both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmclip.errors import UserError
from mmclip.similarity import Exponents, magnitude, normalize

M = 2.0**30
LONGEST = 2.0**17  # up to here M**2 + |x|**2 and M**2 - |x|**2 round to M**2 in float32, with a factor of 4 to spare


class ScoredModel(nn.Module):
    """Towers whose embeddings, ranked by cosine, are ranked by a scoring.

    towers: ``towers(image=, text=)`` -> raw features (mmclip.models.towers). exponents: the scoring's.
    """

    def __init__(self, towers: nn.Module, exponents: Exponents) -> None:
        super().__init__()
        self.towers = towers
        self.gamma_d = float(exponents.gamma_d)

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] -> [B, D + 2] float32, or the raw [B, D] where every length is divided out anyway.

        Errors: UserError for features that are not finite, or longer than float32 has room for.
        """
        with torch.autocast(images.device.type, enabled=False):
            return self._embedding("image", self.towers(image=images)[0])

    @torch.no_grad()
    def encode_text(self, tokens: Tensor) -> Tensor:
        """Token ids [B, L] -> as ``encode_image``."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self._embedding("text", self.towers(text=tokens)[1])

    def _embedding(self, side: str, features: Tensor) -> Tensor:
        if not bool(features.isfinite().all()):
            raise UserError(f"{side} embeddings hold NaN or infinity: every value must be finite")
        if self.gamma_d == 1.0:
            return features
        x = normalize(features, self.gamma_d)
        length = magnitude(x)
        if float(length.max()) > LONGEST:
            raise UserError(
                f"{side} embeddings: a length of {float(length.max()):,.0f}; at most {LONGEST:,.0f} can be told from "
                "others in clip-benchmark. With --scoring cosine any length will do"
            )
        root = (M**2 - length.double().square()).sqrt().to(x).unsqueeze(1)
        none = torch.zeros_like(root)
        return torch.cat([x, root, none] if side == "image" else [x, none, root], dim=1)
