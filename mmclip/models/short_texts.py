"""A text tower on as many tokens as a batch's longest text has: what comes behind a text's end changes no feature.

open_clip's own towers take all positions of their context, whose greater part is padding behind a caption: 77 for a
caption of 15. Where attention is causal and the feature is read at the end token, later positions are computed for
nothing; a Hugging Face tower masks padding. Results change by rounding alone.
"""

from __future__ import annotations

from typing import Any

from open_clip.transformer import text_global_pool
from torch import Tensor, nn

MULTIPLE = 8  # of which a batch's length is one on a GPU: few shapes, and attention's masks stay aligned


def shortened(module: Any, tokens: Tensor, multiple: int = 1) -> Tensor:
    """Token ids [B, L] on the CPU -> [B, l] with what ``encode_short``, or a Hugging Face tower, needs of them.

    module: what holds a model's text tower. l is a multiple of ``multiple``, or L. All are needed where attention goes
    both ways without a mask, or where the feature is read at the last position.
    """
    if not len(tokens):
        return tokens
    if hasattr(module, "pooler"):  # Hugging Face
        columns = (tokens != module.config.pad_token_id).any(dim=0).nonzero()
        used = int(columns.max()) + 1 if len(columns) else 1
    elif _reads_its_end(module):
        used = int(_end(module, tokens).max()) + 1
    else:
        return tokens
    return tokens[:, : -(-used // multiple) * multiple]


def is_short(module: Any, tokens: Tensor) -> bool:
    """Whether token ids are fewer than open_clip's own tower takes. A Hugging Face tower takes any number."""
    return not hasattr(module, "pooler") and _reads_its_end(module) and tokens.shape[1] < len(module.attn_mask)


def encode_short(module: Any, tokens: Tensor) -> Tensor:
    """Raw features [B, D] of open_clip's own text tower, CLIP's or a TextTransformer, for token ids [B, l] that
    ``shortened`` gives: what the tower computes, up to l."""
    length, dtype = tokens.shape[1], module.transformer.get_cast_dtype()
    x = module.token_embedding(tokens).to(dtype) + module.positional_embedding[:length].to(dtype)
    x = module.ln_final(module.transformer(x, attn_mask=module.attn_mask[:length, :length]))
    kind, end = _pooling(module)
    pooled: Tensor = text_global_pool(x, tokens, kind, eos_token_id=end)
    projection = module.text_projection
    if isinstance(projection, nn.Linear):
        pooled = projection(pooled)
    elif projection is not None:
        pooled = pooled @ projection
    return pooled


def _pooling(module: Any) -> tuple[str, int]:
    """(open_clip's pool type, the end token's id): CLIP and TextTransformer name them differently."""
    prefix = "text_" if hasattr(module, "text_pool_type") else ""
    return getattr(module, f"{prefix}pool_type"), getattr(module, f"{prefix}eos_id")


def _reads_its_end(module: Any) -> bool:
    causal = getattr(module, "attn_mask", None) is not None
    plain = getattr(module, "cls_emb", None) is None and not getattr(module, "use_pad_mask", False)
    return causal and plain and not getattr(module, "output_tokens", False) and _pooling(module)[0] in ("argmax", "eos")


def _end(module: Any, tokens: Tensor) -> Tensor:
    """The position that each text's feature is read at: [B]."""
    kind, end = _pooling(module)
    return tokens.eq(end).int().argmax(dim=-1) if kind == "eos" else tokens.argmax(dim=-1)
