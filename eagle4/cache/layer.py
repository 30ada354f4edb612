"""Attention of one layer in a packed forward: store the rows' K/V, then read what each row sees.

Plain functions of a `LayerStep`, so that eager and compiled layers run the same code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import PagedView, fold_visible, paged_attention, tree_attention


class LayerStep(NamedTuple):
    """One layer's share of a step as plain tensors and integers, so that a compiler can trace it.

    Without ``mask`` the layer folds the visibility itself, which a compiled layer does in passing.
    """

    keys_SHD: torch.Tensor  # the layer's whole pool
    values_SHD: torch.Tensor
    slot_R: torch.Tensor  # where rows are written
    visible_BML: torch.Tensor
    query_position_BM: torch.Tensor
    key_position_BL: torch.Tensor
    pad_BM: torch.Tensor | None  # None: one sequence, nothing to pad
    unpad_R: torch.Tensor | None
    slot_BL: torch.Tensor | None  # None: sequences are runs of slots, see start and stride
    start: int = 0
    stride: int = 0
    mask: torch.Tensor | None = None
    view: PagedView | None = None  # keys stay in their pages; nothing about single keys is set
    page_size: int = 0


def attend_layer(
    step: LayerStep,
    query_RHD: torch.Tensor,
    key_RHD: torch.Tensor,
    value_RHD: torch.Tensor,
    *,
    sliding_window: int | None = None,
    **options,
) -> torch.Tensor:
    """Store the rows' K/V in their slots, then attend: ``[R, Hq, D]`` -> ``[R, Hq, Dv]``.

    ``sliding_window`` is asked when the step carries no mask; ``options`` go to
    `ops.tree_attention` or `ops.paged_attention`.
    """
    step.keys_SHD.index_copy_(0, step.slot_R, key_RHD)
    step.values_SHD.index_copy_(0, step.slot_R, value_RHD)
    query_BMHD = query_RHD.unsqueeze(0) if step.pad_BM is None else query_RHD[step.pad_BM]
    if step.view is not None:
        pools, where = (step.keys_SHD, step.values_SHD), (step.view, step.page_size)
        options["sliding_window"] = sliding_window
        out_BMHD = paged_attention(query_BMHD, *pools, *where, **options)
    else:
        mask = _mask(step, query_RHD, sliding_window) if step.mask is None else step.mask
        keys, values = read(step, step.keys_SHD), read(step, step.values_SHD)
        out_BMHD = tree_attention(query_BMHD, keys, values, mask, **options)
    if step.unpad_R is None:
        return out_BMHD.squeeze(0)
    return out_BMHD.flatten(0, 1)[step.unpad_R]


def _mask(step: LayerStep, query_RHD: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    positions = step.query_position_BM, step.key_position_BL
    seen = windowed(step.visible_BML, *positions, sliding_window)
    groups = query_RHD.shape[1] // step.keys_SHD.shape[1]
    return fold_visible(seen, groups, query_RHD.dtype)


def read(step: LayerStep, pool_SHD: torch.Tensor) -> torch.Tensor:
    """Keys or values of every sequence as ``[B, L, heads, width]``; a view when possible."""
    batch, _, length = step.visible_BML.shape
    if step.slot_BL is not None:
        return pool_SHD[step.slot_BL]
    start, stride = step.start, step.stride
    if batch == 1:
        return pool_SHD[start : start + length].unsqueeze(0)
    return pool_SHD[start : start + batch * stride].unflatten(0, (batch, stride))[:, :length]


def windowed(
    visible_BML: torch.Tensor,
    query_position_BM: torch.Tensor,
    key_position_BL: torch.Tensor,
    sliding_window: int | None,
) -> torch.Tensor:
    """Visibility ``[B, M, L]``; a window W lets position p see positions in ``(p - W, p]``."""
    if sliding_window is None:
        return visible_BML
    distance = query_position_BM.unsqueeze(-1) - key_position_BL.unsqueeze(1)
    return visible_BML & (distance < sliding_window)
