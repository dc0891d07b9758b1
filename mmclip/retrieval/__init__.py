"""Exact ranking of raw embeddings: who is relevant (Qrels), ranks and lists of the best (Ranking), hubness correction.

:func:`rank` ranks the documents of each query under several scorings, :func:`rank_both` also the opposite direction
from the same product. :mod:`~mmclip.retrieval.hubness` has the additive correction of a document's score over a query
bank. Knows queries and documents, no modality. Imports :mod:`mmclip.similarity` and :mod:`mmclip.errors` only.
"""

from mmclip.retrieval.hubness import QueryBank, document_offsets, with_offset, with_one
from mmclip.retrieval.qrels import Qrels
from mmclip.retrieval.ranking import BLOCK_BYTES, Ranking, as_floats, norms, rank, rank_both

__all__ = [
    "BLOCK_BYTES",
    "Qrels",
    "QueryBank",
    "Ranking",
    "as_floats",
    "document_offsets",
    "norms",
    "rank",
    "rank_both",
    "with_offset",
    "with_one",
]
