"""Attention of tree rows over gathered or viewed keys and values (torch reference).

``softmax(softcap(q k^T * scale) + visibility [, sink]) v`` per row, where a row sees the committed
prefix of its sequence and its ancestors. Query heads that share a KV head are folded into the row
axis, so grouped-query attention reads K and V once and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F


class Share(NamedTuple):
    """One sequence's part of packed rows, where its keys and values lie in a run of slots."""

    row: int  # its first row
    start: int  # its first slot
    mask: torch.Tensor  # [1, 1, G * m, L] of its m rows and L slots, as `fold_visible` makes it


def fold_visible(visible_BML: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask ``[B, 1, M * G, L]`` of a visibility, for G query heads per KV head.

    All layers of a forward share it: `tree_attention` takes it in place of the visibility.
    """
    mask = torch.zeros(visible_BML.shape, dtype=dtype, device=visible_BML.device)
    mask = mask.masked_fill_(~visible_BML, float("-inf"))
    return mask.repeat_interleave(groups, dim=1).unsqueeze(1)


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
    groups = query_BMHD.shape[2] // key.shape[1]
    query = _fold(query_BMHD, groups)
    mask = visible if visible.ndim == 4 else fold_visible(visible, groups, query.dtype)
    return _unfold(_attend(query, key, value, mask, groups, scale, softcap, sinks_H), groups)


def ragged_attention(
    query_RHD: torch.Tensor,
    key_SHD: torch.Tensor,
    value_SHD: torch.Tensor,
    shares: Sequence[Share],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tree_attention` of packed rows ``[R, Hq, D]`` over a pool's slots: ``[R, Hq, Dv]``.

    One call per sequence, on its keys where they lie: nothing is gathered or padded, which on a CPU
    costs more than the calls do. ``shares`` in the order of the rows, without gaps.
    """
    key, value = (pool.transpose(0, 1).unsqueeze(0) for pool in (key_SHD, value_SHD))
    groups = query_RHD.shape[1] // key.shape[1]
    query = _fold(query_RHD.unsqueeze(0), groups)
    parts = []
    for row, start, mask in shares:
        count, length = mask.shape[2:]
        own = query.narrow(2, row * groups, count)
        seen = key.narrow(2, start, length), value.narrow(2, start, length)
        parts.append(_attend(own, *seen, mask, groups, scale, softcap, sinks_H))
    return _unfold(torch.cat(parts, dim=2), groups)[0]


def _fold(query_BMHD: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, Hkv, M * G, D]``."""
    batch, most, heads, width = query_BMHD.shape
    query = query_BMHD.view(batch, most, heads // groups, groups, width)
    return query.transpose(1, 2).reshape(batch, heads // groups, most * groups, width)


def _unfold(out: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, Hkv, M * G, D]`` to ``[B, M, Hq, D]``."""
    return out.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    groups: int,
    scale: float | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    factor = float(query.shape[-1]) ** -0.5 if scale is None else scale
    if softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=factor)
    sinks = None if sinks_H is None else sinks_H.view(-1, groups)
    return _explicit(query, key, value, mask, factor, softcap, sinks)


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
    column = sinks.float().repeat(1, rows)[None, :, :, None]
    score = torch.cat([score, column.expand(score.shape[0], -1, -1, -1)], dim=-1)
    return torch.matmul(score.softmax(-1)[..., :-1].to(value.dtype), value)
