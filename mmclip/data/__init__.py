"""Data: image-text pairs (shards, folders, CSV, the built-in scenes) and text collections, with batches of them.

``ImageTextData`` holds captions and reads images by row; ``TrainBatches`` yields batches in an order that follows from
(seed, epoch, row). ``BeirCollection`` and ``TextPairs`` are the same for text retrieval. May import config, console, io
and errors; knows no model, loss or metric.
"""

from mmclip.data.beir import BeirCollection, open_beir
from mmclip.data.image_text import BadSample, ImageTextData
from mmclip.data.loading import Batch, TrainBatches
from mmclip.data.shards import open_data
from mmclip.data.text_pairs import TextPairs, open_pairs

__all__ = [
    "BadSample",
    "Batch",
    "BeirCollection",
    "ImageTextData",
    "TextPairs",
    "TrainBatches",
    "open_beir",
    "open_data",
    "open_pairs",
]
