"""Exact ranking of raw embeddings: who is relevant (Qrels), ranks and lists of the best (Ranking), hubness correction.

:func:`rank` ranks the documents of each query under several scorings, :func:`rank_both` also the opposite direction
from the same product. :mod:`~mmclip.retrieval.hubness` has the additive correction of a document's score over a query
bank. Knows queries and documents, no modality. Imports :mod:`mmclip.similarity` and :mod:`mmclip.errors` only.
"""

from mmclip.retrieval.qrels import Qrels
from mmclip.retrieval.ranking import BLOCK_BYTES, Ranking, as_floats, rank, rank_both

__all__ = ["BLOCK_BYTES", "Qrels", "Ranking", "as_floats", "rank", "rank_both"]
