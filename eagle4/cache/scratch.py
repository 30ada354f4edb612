"""Room for a round's drafted rows, addressed once: what changes from level to level is tensors.

Drafted rows live behind the committed entries of every sequence, level after level. How many there
are and what they see is only known on the device, so shapes are those of a full tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import PagedView, fold_visible, has_kernels, pack_bits, window_visible
from .buckets import bucket_length
from .layer import LayerStep
from .paged import page_lists
from .pages import PageTable
from .spans import spans


class Scratch(NamedTuple):
    """W entries behind ``prefix_B`` committed ones, in tensors and integers that are traced.

    Keys are read by slots, as runs of slots, or in their pages, as in `LayerStep`; ``length``
    covers the longest sequence and its scratch.
    """

    slot_BW: torch.Tensor
    prefix_B: torch.Tensor
    length: int
    slot_BL: torch.Tensor | None = None
    start: int = 0
    stride: int = 0
    page_BP: torch.Tensor | None = None
    page_size: int = 0


class Expanded(NamedTuple):
    """The rows of one level, M per sequence, behind ``first`` entries already written."""

    first: torch.Tensor  # int64, 0-d
    sees_BMW: torch.Tensor  # bool: entries that each row sees, itself included
    position_BM: torch.Tensor
    position_BW: torch.Tensor  # of the entries


def make_scratch(
    table: PageTable,
    owners: list[tuple[int, int]],
    entries: int,
    device: torch.device,
    gathers: bool = False,
    paged: bool | None = None,
    bucketed: bool = False,
) -> Scratch:
    """Address ``entries`` rows behind every (sequence, committed entries) of ``owners``.

    The table must already hold them. ``gathers``, ``paged`` and ``bucketed`` as in `build_step`.
    """
    slots = [table.slots(sequence, first, first + entries) for sequence, first in owners]
    length = bucket_length(max(first for _, first in owners) + entries, bucketed)
    scratch = Scratch(
        torch.tensor(slots, device=device),
        torch.tensor([first for _, first in owners], device=device),
        length,
    )
    if has_kernels(device) if paged is None else paged:
        pages = page_lists(table, [sequence for sequence, _ in owners], bucketed)
        page_BP = torch.tensor(pages, device=device)
        return scratch._replace(page_BP=page_BP, page_size=table.page_size)
    spanned = [(sequence, first + entries) for sequence, first in owners]
    run, slot_BL = spans(table, spanned, length, device, gathers, bucketed)
    start, stride = run or (0, 0)
    return scratch._replace(slot_BL=slot_BL, start=start, stride=stride)


def scratch_layer(
    scratch: Scratch,
    keys_SHD: torch.Tensor,
    values_SHD: torch.Tensor,
    rows: Expanded,
    groups: int,
    sliding_window: int | None,
) -> LayerStep:
    """One layer's share of a level, traceable: nothing in it is read on the host."""
    batch, most = rows.position_BM.shape
    index_M = torch.arange(most, device=rows.position_BM.device)
    column_BM = (rows.first + index_M).expand(batch, -1)
    pad_BM = unpad_R = None
    if batch > 1:
        unpad_R = torch.arange(batch * most, device=index_M.device)
        pad_BM = unpad_R.view(batch, most)
    slot_R = scratch.slot_BW.gather(1, column_BM).flatten()
    own = LayerStep(keys_SHD, values_SHD, slot_R, pad_BM, unpad_R)
    seen = scratch.prefix_B, rows.sees_BMW, rows.position_BM, rows.position_BW
    if scratch.page_BP is not None:
        prefix_B, sees_BMW, *positions = seen
        view = PagedView(scratch.page_BP, prefix_B, pack_bits(sees_BMW), *positions)
        return own._replace(view=view, page_size=scratch.page_size)
    visible_BML = window_visible(*seen, scratch.length, sliding_window)
    return own._replace(
        slot_BL=scratch.slot_BL,
        start=scratch.start,
        stride=scratch.stride,
        mask=fold_visible(visible_BML, groups, keys_SHD.dtype),
    )
