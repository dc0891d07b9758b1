"""Samples that could not be used: counted, named, and, above a limit, an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mmclip.data.image_text import BadSample, skipped_line
from mmclip.errors import UserError


class Skipped:
    """Why samples of the training data are missing, by their keys. ``limit``: --max-bad-samples, None for no limit."""

    def __init__(self, limit: int | None = None, why: Mapping[str, str] | None = None) -> None:
        """why: of samples known already, as ``by_key`` gives them. Errors: UserError above the limit."""
        self.limit = limit
        self.why: dict[str, str] = dict(why or {})
        self._check()

    def add(self, samples: Iterable[BadSample]) -> list[str]:
        """Take samples in; a line for each that was not known. Errors: UserError above the limit."""
        lines = []
        for sample in samples:
            if sample.key not in self.why:
                self.why[sample.key] = sample.why
                lines.append(f"skipped {sample} ({len(self.why)} so far)")
        self._check()
        return lines

    def _check(self) -> None:
        if self.limit is not None and len(self.why) > self.limit:
            raise UserError(f"--max-bad-samples {self.limit}: {skipped_line(self.why)}")
