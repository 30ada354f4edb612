"""Attention of tree rows over gathered or viewed keys and values (torch reference).

``softmax(softcap(q k^T * scale) + visibility [, sink]) v`` per row, where a row sees the committed
prefix of its sequence and its ancestors. Query heads that share a KV head are folded into the row
axis, so grouped-query attention reads K and V once and copies nothing.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def fold_visible(visible_BML: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask ``[B, 1, G * M, L]`` of a visibility, for G query heads per KV head.

    All layers of a forward share it: `tree_attention` takes it in place of the visibility.
    """
    mask = torch.zeros(visible_BML.shape, dtype=dtype, device=visible_BML.device)
    return mask.masked_fill_(~visible_BML, float("-inf")).repeat(1, groups, 1).unsqueeze(1)


def tree_attention(
    query_BMHD: torch.Tensor,
    key_BLHD: torch.Tensor,
    value_BLHD: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[B, M, Hq, D]`` queries, ``[B, L, Hkv, D]`` keys and values -> ``[B, M, Hq, Dv]``.

    ``visible [B, M, L]`` is True where row m of sequence b attends key l, or is what `fold_visible`
    made of that in the query's dtype; every row must see something.
    ``softcap`` and ``sinks_H`` (one logit per query head that takes probability and gives nothing)
    follow Gemma 2 and gpt-oss.
    """
    key, value = key_BLHD.transpose(1, 2), value_BLHD.transpose(1, 2)
    batch, most, heads_q, width = query_BMHD.shape
    heads_kv = key.shape[1]
    groups = heads_q // heads_kv
    # [B, M, Hkv, G, D] -> [B, Hkv, G * M, D]
    query = query_BMHD.unflatten(2, (heads_kv, groups)).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, heads_kv, groups * most, width)
    mask = visible if visible.ndim == 4 else fold_visible(visible, groups, query.dtype)
    factor = float(width) ** -0.5 if scale is None else scale
    if softcap is None and sinks_H is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=factor)
    else:
        sinks = None if sinks_H is None else sinks_H.view(heads_kv, groups)
        out = _explicit(query, key, value, mask, factor, softcap, sinks)
    return out.unflatten(2, (groups, most)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    score = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score + mask
    if sinks is None:
        return torch.matmul(score.softmax(-1).to(value.dtype), value)
    rows = score.shape[2] // sinks.shape[1]
    column = sinks.float().repeat_interleave(rows, dim=1)[None, :, :, None]
    score = torch.cat([score, column.expand(score.shape[0], -1, -1, -1)], dim=-1)
    return torch.matmul(score.softmax(-1)[..., :-1].to(value.dtype), value)
