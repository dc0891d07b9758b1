"""mmclip: CLIP and text retrieval training in which embedding norms may carry relevance.

The public names are imported on first use, so that ``import mmclip`` and ``mmclip --help`` need no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {  # public name -> where it is defined
    "ContrastiveLoss": "losses.contrastive.ContrastiveLoss",
    "Direction": "roles.Direction",
    "Exponents": "roles.Exponents",
    "Normalization": "roles.Normalization",
    "Similarity": "similarity.Similarity",
    "clip_loss": "losses.contrastive.clip_loss",
    "evaluate": "evaluation.evaluate.evaluate",
    "load_model": "models.factory.load_clip",
    "rank": "retrieval.ranking.rank",
    "score": "similarity.score",
    "text_loss": "losses.contrastive.text_loss",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mmclip' has no attribute {name!r}")
    module, _, attribute = _HOME[name].rpartition(".")
    return getattr(import_module(f"mmclip.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted(_HOME)
