"""mmclip: CLIP and text retrieval training in which embedding length may carry relevance."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["ContrastiveLoss", "Direction", "Exponents", "Normalization", "clip_loss", "load_model", "score"]

_HOME = {
    "ContrastiveLoss": "losses.contrastive",
    "clip_loss": "losses.contrastive",
    "load_model": "models.factory",
    "Direction": "roles",
    "Exponents": "roles",
    "Normalization": "roles",
    "score": "similarity",
}


def __getattr__(name: str) -> Any:
    """Public names, imported when they are asked for: ``--help`` of a script need not wait for torch."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"mmclip.{_HOME[name]}"), "load_clip" if name == "load_model" else name)
    raise AttributeError(f"module 'mmclip' has no attribute {name!r}")
