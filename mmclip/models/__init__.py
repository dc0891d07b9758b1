"""Models: open_clip's towers and text encoders as raw embeddings, their metadata and exports.

``ClipModel`` has ``Towers``, a transform and a tokenizer; ``TextEncoder`` wraps sentence-transformers. The metadata
(mmclip.json) say how embeddings are scored. Imports config, io and what is below them; nothing here scores or trains.
"""

from mmclip.config.model_config import read_metadata
from mmclip.models.export import export_clip, export_text
from mmclip.models.factory import ClipModel, build_model, load_clip
from mmclip.models.text_encoder import TextEncoder, load_text_model
from mmclip.models.towers import Towers

__all__ = [
    "ClipModel",
    "TextEncoder",
    "Towers",
    "build_model",
    "export_clip",
    "export_text",
    "load_clip",
    "load_text_model",
    "read_metadata",
]
