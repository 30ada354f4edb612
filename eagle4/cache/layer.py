"""Attention of one layer in a packed forward: store the rows' K/V, then read what each row sees.

Plain functions of a `LayerStep`, so that eager and compiled layers run the same code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import PagedView, Share, paged_attention, ragged_attention, tree_attention


class LayerStep(NamedTuple):
    """One layer's share of a step as plain tensors and integers, so that a compiler can trace it.

    ``mask`` as `ops.fold_visible` makes it, or a ``view`` or ``shares``: keys then stay in place.
    """

    keys_SHD: torch.Tensor  # the layer's whole pool
    values_SHD: torch.Tensor
    slot_R: torch.Tensor  # where rows are written
    pad_BM: torch.Tensor | None  # None: one sequence, nothing to pad
    unpad_R: torch.Tensor | None
    slot_BL: torch.Tensor | None = None  # None: sequences are runs of slots, see start and stride
    start: int = 0
    stride: int = 0
    mask: torch.Tensor | None = None
    view: PagedView | None = None
    page_size: int = 0
    shares: list[Share] | None = None


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

    ``sliding_window`` is already in the step's mask, where there is one; ``options`` go to
    `ops.tree_attention`, `ops.paged_attention` or `ops.ragged_attention`.
    """
    write_rows(step.keys_SHD, step.values_SHD, step.slot_R, key_RHD, value_RHD)
    if step.shares is not None:
        pools = step.keys_SHD, step.values_SHD
        return ragged_attention(query_RHD, *pools, step.shares, **options)
    query_BMHD = pad(query_RHD, step.pad_BM)
    if step.view is not None:
        pools, where = (step.keys_SHD, step.values_SHD), (step.view, step.page_size)
        options["sliding_window"] = sliding_window
        out_BMHD = paged_attention(query_BMHD, *pools, *where, **options)
    else:
        assert step.mask is not None
        keys, values = read(step, step.keys_SHD), read(step, step.values_SHD)
        out_BMHD = tree_attention(query_BMHD, keys, values, step.mask, **options)
    return unpad(out_BMHD, step.unpad_R)


def write_rows(
    keys_SHD: torch.Tensor,
    values_SHD: torch.Tensor,
    slot_R: torch.Tensor,
    key_RHD: torch.Tensor,
    value_RHD: torch.Tensor,
) -> None:
    """Write rows to their slots of one layer's pool."""
    keys_SHD.index_copy_(0, slot_R, key_RHD)
    values_SHD.index_copy_(0, slot_R, value_RHD)


def pad(rows: torch.Tensor, pad_BM: torch.Tensor | None) -> torch.Tensor:
    """Packed ``[R, ...]`` to ``[B, M, ...]``; padding repeats a sequence's first row."""
    return rows.unsqueeze(0) if pad_BM is None else rows[pad_BM]


def unpad(padded: torch.Tensor, unpad_R: torch.Tensor | None) -> torch.Tensor:
    """``[B, M, ...]`` back to packed ``[R, ...]``."""
    return padded.squeeze(0) if unpad_R is None else padded.flatten(0, 1)[unpad_R]


def read(step: LayerStep, pool_SHD: torch.Tensor) -> torch.Tensor:
    """Keys or values of every sequence as ``[B, L, heads, width]``; a view when possible."""
    if step.slot_BL is not None:
        return pool_SHD[step.slot_BL]
    assert step.mask is not None
    batch, length = step.mask.shape[0], step.mask.shape[-1]
    start, stride = step.start, step.stride
    if batch == 1:
        return pool_SHD[start : start + length].unsqueeze(0)
    return pool_SHD[start : start + batch * stride].unflatten(0, (batch, stride))[:, :length]
