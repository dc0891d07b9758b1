"""Evaluation: raw embeddings with relevance -> results in every direction and scoring, and runs compared.

:func:`evaluate` takes ``EvalSet``s of images and texts or of queries and documents alike and returns ``Results``, which
are saved, loaded and compared. Also zero-shot classification, TREC run files and clip-benchmark's command line. May
import embeddings and what stands below it; prints no tables and trains nothing.
"""

from mmclip.evaluation.comparison import compare, verdict
from mmclip.evaluation.eval_set import EvalSet, EvalSource, image_text_sets, text_set
from mmclip.evaluation.evaluate import evaluate
from mmclip.evaluation.results import Results, load_results, save_results
from mmclip.evaluation.trec import read_run as read_trec_run
from mmclip.evaluation.zero_shot import ZeroShot

__all__ = [
    "EvalSet",
    "EvalSource",
    "Results",
    "ZeroShot",
    "compare",
    "evaluate",
    "image_text_sets",
    "load_results",
    "read_trec_run",
    "save_results",
    "text_set",
    "verdict",
]
