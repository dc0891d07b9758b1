"""Numbers from ranks and raw embeddings, with intervals: ranking metrics, magnitude statistics, geometry, Fisher.

Ranking metrics of single queries (:func:`per_query`), one bootstrap over clusters of queries and training seeds, paired
significance, Cohen's d and AUC of the documents' norms, geometry of raw vectors, condition numbers of Fisher matrices.
Imports :mod:`mmclip.retrieval` (the Ranking type) and :mod:`mmclip.similarity`; knows roles, no modality.
"""

from mmclip.metrics.bootstrap import (
    DETECTABLE,
    RESAMPLES,
    cluster_counts,
    cluster_sums,
    finite_interval,
    interval,
    mean_interval,
    mean_intervals,
    mean_samples,
    over_seeds,
    paired_difference,
    several,
)
from mmclip.metrics.fisher import fisher_report
from mmclip.metrics.geometry import effective_rank, hubness
from mmclip.metrics.magnitude import cohens_d, magnitude_auc
from mmclip.metrics.rank import RATES, TEXT_RATES, per_query
from mmclip.metrics.significance import holm, randomization_p, smallest_detectable

__all__ = [
    "DETECTABLE",
    "RATES",
    "RESAMPLES",
    "TEXT_RATES",
    "cluster_counts",
    "cluster_sums",
    "cohens_d",
    "effective_rank",
    "finite_interval",
    "fisher_report",
    "holm",
    "hubness",
    "interval",
    "magnitude_auc",
    "mean_interval",
    "mean_intervals",
    "mean_samples",
    "over_seeds",
    "paired_difference",
    "per_query",
    "randomization_p",
    "several",
    "smallest_detectable",
]
