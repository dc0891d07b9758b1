"""Embeddings: raw vectors of images and texts, encoded once, cached, saved and served.

``encode_images`` and ``encode_texts`` run an encoder in batches, ``FeatureSource`` is a data set with cached outputs of
locked trunks, ``Embeddings`` are vectors with ids and relevance, and a file of them. :mod:`mmclip.embeddings.serving`
makes what an inner-product index holds. May import models, data, retrieval, config and io; nothing here ranks.
"""

from mmclip.embeddings.encode import EncodeOptions, encode_images, encode_texts
from mmclip.embeddings.features import FeatureSource
from mmclip.embeddings.files import Distractors, Embeddings, load_embeddings, save_embeddings

__all__ = [
    "Distractors",
    "Embeddings",
    "EncodeOptions",
    "FeatureSource",
    "encode_images",
    "encode_texts",
    "load_embeddings",
    "save_embeddings",
]
