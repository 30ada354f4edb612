"""Steps whose keys stay in their pages: what the attention kernel reads.

Nothing here is as long as the context except the page list itself.
"""

from __future__ import annotations

import torch

from ..ops import PagedView, pack_bits, paged_attention
from .pages import PageTable
from .rows import AttentionStep, Window


class PagedStep(AttentionStep):
    """Page lists, prefix lengths and window bit masks of one packed forward."""

    def __init__(self, table: PageTable, windows: list[Window], device: torch.device):
        super().__init__(table, windows, device)
        self.page_size = table.page_size
        pages = [table.pages[window.sequence] for window in windows]
        longest = max(map(len, pages))
        page_BP = torch.tensor(
            [row + row[:1] * (longest - len(row)) for row in pages], device=device
        )
        prefix_B = torch.tensor([window.prefix for window in windows], device=device)
        most = max(window.visible.shape[0] for window in windows)
        widest = max(window.visible.shape[1] for window in windows)
        sees_BMW = torch.zeros(len(windows), most, widest, dtype=torch.bool, device=device)
        position_BW = torch.zeros(len(windows), widest, dtype=torch.int64, device=device)
        for b, window in enumerate(windows):
            count, width = window.visible.shape
            sees_BMW[b, :count, :width] = window.visible
            sees_BMW[b, count:, :width] = window.visible[0]  # padding repeats the first row
            position_BW[b, :width] = window.position
        query_position_BM = self.pad(self.position_R)
        self.view = PagedView(
            page_BP, prefix_B, pack_bits(sees_BMW), query_position_BM, position_BW
        )

    def attend(
        self,
        query_RHD: torch.Tensor,
        keys_SHD: torch.Tensor,
        values_SHD: torch.Tensor,
        sliding_window: int | None,
        **options,
    ) -> torch.Tensor:
        """As `AttentionStep.attend`; ``options`` go to `ops.paged_attention`."""
        return self.unpad(
            paged_attention(
                *(self.pad(query_RHD), keys_SHD, values_SHD, self.view, self.page_size),
                sliding_window=sliding_window,
                **options,
            )
        )
