"""open_clip's training augmentation as flags give it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mmclip.errors import UserError, printable


def parse_aug_cfg(pairs: Sequence[str] | None) -> dict[str, Any]:
    """KEY=VALUE pairs for open_clip's AugmentationCfg: numbers become floats, 'a,b' a tuple.

    Errors: UserError for an unknown key or a value that is no number.

    >>> parse_aug_cfg(["scale=0.9,1.0"])
    {'scale': (0.9, 1.0)}
    """
    valid = ("scale", "ratio", "color_jitter", "re_prob", "re_count", "color_jitter_prob", "gray_scale_prob", "none")
    parsed: dict[str, Any] = {}
    for pair in pairs or ():
        key, _, text = pair.partition("=")
        if key not in valid:
            raise UserError(f"--aug-cfg {printable(pair)}: unknown key {printable(key)!r}; valid: {', '.join(valid)}")
        try:
            numbers = tuple(float(v) for v in text.split(","))
        except ValueError:
            numbers = (math.nan,)
        if not all(math.isfinite(n) for n in numbers):
            raise UserError(f"--aug-cfg {printable(pair)}: numbers expected after '='")
        parsed[key] = numbers if len(numbers) > 1 else int(numbers[0]) if key == "re_count" else numbers[0]
    return parsed
