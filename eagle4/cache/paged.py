"""What the attention kernel reads of a step: pages, prefix lengths and window bit masks.

Nothing here is as long as the context except the page list itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ops import PagedView, pack_bits
from ..ops.sizes import power_of_2
from .pages import PageTable

if TYPE_CHECKING:
    from .step import Window


def paged_view(
    table: PageTable,
    windows: list[Window],
    query_position_BM: torch.Tensor,
    bucketed: bool = False,
) -> PagedView:
    """The view of rows packed in the order of ``windows``, padded to M rows per sequence."""
    device, most = query_position_BM.device, query_position_BM.shape[1]
    pages = page_lists(table, [window.sequence for window in windows], bucketed)
    widest = max(window.visible.shape[1] for window in windows)
    sees_BMW = torch.zeros(len(windows), most, widest, dtype=torch.bool, device=device)
    position_BW = torch.zeros(len(windows), widest, dtype=torch.int64, device=device)
    for b, window in enumerate(windows):
        count, width = window.visible.shape
        sees_BMW[b, :count, :width] = window.visible
        sees_BMW[b, count:, :width] = window.visible[0]  # padding repeats the first row
        position_BW[b, :width] = window.position
    return PagedView(
        torch.tensor(pages, device=device),
        torch.tensor([window.prefix for window in windows], device=device),
        pack_bits(sees_BMW),
        query_position_BM,
        position_BW,
    )


def page_lists(table: PageTable, sequences: list[int], bucketed: bool) -> list[list[int]]:
    """All pages of every sequence, as many as the longest list; ``bucketed``: a power of two."""
    longest = max(len(table.pages[sequence]) for sequence in sequences)
    return table.padded(sequences, power_of_2(longest) if bucketed else None)
