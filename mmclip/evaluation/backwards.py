"""A pool ranked against the direction that was trained: ``reversed`` and ``corrected`` (mmclip.retrieval.hubness)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from mmclip.evaluation.eval_set import Pool
from mmclip.evaluation.results import CORRECTED, REVERSED
from mmclip.retrieval import Qrels, Ranking, rank
from mmclip.retrieval.hubness import Bank, bank_side, corrected_candidates, corrected_queries, log_evidence
from mmclip.similarity import (
    SCALE_INIT,
    TINY,
    Direction,
    Exponents,
    Normalization,
    mean_length_factors,
)

Json = dict[str, Any]


class Backwards:
    """What reading a trained direction backwards needs.

    native: exponents by role. scales: alpha of every trained direction, None where it is not told. main: side -> the
    main pool's vectors, on which an untold scale is calibrated (effective scale ``SCALE_INIT``), once for all pools.
    """

    def __init__(
        self,
        native: Exponents,
        scales: dict[Direction, float | None],
        bank: Bank | None,
        main: Mapping[str, Tensor],
    ) -> None:
        self.native, self.bank = native, bank
        self.told = {d: float(alpha) for d, alpha in scales.items() if alpha is not None}
        self.scales = dict(self.told)
        for direction in scales.keys() - self.told.keys():
            lengths = float(mean_length_factors(*direction.roles(main), native).prod())
            self.scales[direction] = SCALE_INIT / max(lengths, TINY)

    def extend(self, pool: Pool, direction: Direction, rankings: dict[str, Ranking], block_bytes: int) -> Json:
        """Leave ``reversed`` and ``corrected`` in ``rankings`` where they exist for ``direction``; {scoring: facts}."""
        trained = direction.opposite
        if trained not in self.scales:
            rankings.pop(REVERSED, None)
            return {}
        alpha = self.scales[trained]
        query, candidate = direction.roles(pool.vectors)
        found = self._evidence(direction, pool, candidate, alpha, block_bytes)
        if self.bank is None or found is None:
            return {}
        evidence, size = found
        rankings[CORRECTED] = rank(
            corrected_queries(query, self.native),
            corrected_candidates(candidate, evidence, self.native, alpha),
            Qrels(np.column_stack(direction.roles({"image": pool.pairs[:, 0], "text": pool.pairs[:, 1]})), pool.gains),
            {CORRECTED: Normalization.DOT.exponents},
            block_bytes=block_bytes,
        )[CORRECTED]
        about = {
            "bank": self.bank.name,
            "bank_size": size,
            "transductive": self.bank.transductive,
            "alpha": alpha,
            "alpha_source": "given" if trained in self.told else "calibrated",
        }
        side = bank_side(direction)
        if side in self.bank.overlap:
            about["bank_overlap"] = self.bank.overlap[side]
        return {CORRECTED: about}

    def _evidence(
        self, direction: Direction, pool: Pool, candidate: Tensor, alpha: float, block_bytes: int
    ) -> tuple[Tensor, int] | None:
        """(log-evidence of every candidate, the bank's size), or None without a bank for them."""
        if self.bank is None:
            return None
        side = bank_side(direction)
        rows = self.bank.of(side, pool.vectors)
        if rows is not None:
            return log_evidence(candidate, rows, self.native, alpha, block_bytes), len(rows)
        known = self.bank.evidence.get(direction)
        if known is None or len(known) != len(candidate):  # a pool with other candidates than the main one
            return None
        return known.to(candidate.device), self.bank.sizes.get(side, 0)
