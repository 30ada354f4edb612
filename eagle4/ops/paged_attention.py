"""Attention of tree rows over a paged pool: the committed prefix, then a window under bit masks.

What `tree_attention` computes over a gathered view, addressed by pages instead: entry l of a
sequence lies in slot ``page[l // page_size] * page_size + l % page_size``. A row sees the prefix
(all of it, or what its sliding window leaves) and those window entries whose bit is set in its
words. The kernel reads the prefix once for all rows of a sequence, in parts with a log-sum-exp
each, the window behind it, and merges (cascade; DESIGN.md section 4).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .bits import unpack_bits
from .dispatch import wants_triton
from .tree_attention import tree_attention


class PagedView(NamedTuple):
    """What the rows of one packed forward see: tensors only, the same for all layers.

    M rows of B sequences; W >= 1 window entries, X = ceil(W / 64) words.
    """

    page_BP: torch.Tensor  # int64 pages of every sequence, padded with any valid page
    prefix_B: torch.Tensor  # int64 committed entries
    bits_BMX: torch.Tensor  # int64 window entries that a row sees, see `bits`
    query_position_BM: torch.Tensor  # int64
    window_position_BW: torch.Tensor  # int64 positions of the window entries


def paged_attention(
    query_BMHD: torch.Tensor,
    key_SHD: torch.Tensor,
    value_SHD: torch.Tensor,
    view: PagedView,
    page_size: int,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """``[B, M, Hq, D]`` queries over pools ``[slots, Hkv, D]`` and ``[slots, Hkv, Dv]``.

    Returns ``[B, M, Hq, Dv]``. Every row must see something. A sliding window W lets position p
    see positions in ``(p - W, p]``; committed entry l has position l. The other options are those
    of `tree_attention`.
    """
    options = {"scale": scale, "softcap": softcap, "sinks_H": sinks_H}
    if wants_triton(impl, query_BMHD, key_SHD):
        from .triton.paged_attention import paged_attention as kernel

        return kernel(
            query_BMHD,
            key_SHD,
            value_SHD,
            view,
            page_size,
            sliding_window=sliding_window,
            **options,
        )
    slot_BL = page_slots(view.page_BP, page_size)
    visible_BML = _visible(view, slot_BL.shape[1], sliding_window)
    # Beyond the table's end there is nothing, and nothing is seen.
    return tree_attention(query_BMHD, key_SHD[slot_BL], value_SHD[slot_BL], visible_BML, **options)


def page_slots(page_BP: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots ``[B, L]`` of every entry that the pages cover."""
    offset = torch.arange(page_size, device=page_BP.device)
    return (page_BP.unsqueeze(-1) * page_size + offset).flatten(1)


def _visible(view: PagedView, length: int, sliding_window: int | None) -> torch.Tensor:
    """What every row sees of every entry, ``[B, M, L]``."""
    member_BMW = unpack_bits(view.bits_BMX, view.window_position_BW.shape[1])
    where = view.query_position_BM, view.window_position_BW
    return window_visible(view.prefix_B, member_BMW, *where, length, sliding_window)


def window_visible(
    prefix_B: torch.Tensor,
    member_BMW: torch.Tensor,
    query_position_BM: torch.Tensor,
    window_position_BW: torch.Tensor,
    length: int,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """bool ``[B, M, length]``: the committed prefix, then the members of the window behind it.

    A row at position p sees what its sliding window leaves of both; committed entry l has
    position l.
    """
    index_L = torch.arange(length, device=prefix_B.device)
    place_BL = index_L - prefix_B.unsqueeze(1)
    rows, window = member_BMW.shape[1:]
    inside_BL = (place_BL >= 0) & (place_BL < window)
    place_BL = place_BL.clamp(0, window - 1)
    seen_BML = member_BMW.gather(2, place_BL.unsqueeze(1).expand(-1, rows, -1))
    is_prefix_BL = index_L < prefix_B.unsqueeze(1)
    visible_BML = torch.where(inside_BL.unsqueeze(1), seen_BML, is_prefix_BL.unsqueeze(1))
    if sliding_window is not None:
        position_BL = window_position_BW.gather(1, place_BL)
        position_BL = torch.where(inside_BL, position_BL, index_L)
        distance_BML = query_position_BM.unsqueeze(-1) - position_BL.unsqueeze(1)
        visible_BML = visible_BML & (distance_BML < sliding_window)
    return visible_BML
