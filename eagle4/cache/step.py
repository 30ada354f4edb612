"""One packed forward as attention sees it: where rows write and what they may read.

A row of sequence b sees the committed prefix (indices below ``prefix``) and those window entries
that ``Window.visible`` names: its ancestors and itself. Positions are carried separately, because a
drafted token's position is its depth, not its index.
"""

from __future__ import annotations

import torch

from ..ops import has_kernels
from .dense import DenseStep
from .paged import PagedStep
from .pages import PageTable
from .pool import KVPool
from .rows import AttentionStep, Window


def attend(
    pool: KVPool,
    layer: int,
    step: AttentionStep,
    query_RHD: torch.Tensor,
    key_RHD: torch.Tensor,
    value_RHD: torch.Tensor,
    *,
    sliding_window: int | None = None,
    **options,
) -> torch.Tensor:
    """Store the rows' K/V in their slots, then attend: ``[R, Hq, D]`` -> ``[R, Hq, Dv]``.

    ``options`` go to `ops.tree_attention` or `ops.paged_attention`.
    """
    keys_SHD, values_SHD = pool.store(layer, step.slot_R, key_RHD, value_RHD)
    return step.attend(query_RHD, keys_SHD, values_SHD, sliding_window, **options)


def build_step(
    table: PageTable, windows: list[Window], device: torch.device, paged: bool | None = None
) -> AttentionStep:
    """Index tensors for rows packed in the order of ``windows``.

    ``paged``: read keys in their pages; None: where a kernel can do that.
    """
    is_paged = has_kernels(device) if paged is None else paged
    return (PagedStep if is_paged else DenseStep)(table, windows, device)
