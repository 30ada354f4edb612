"""What rows may read: visibility under sliding windows, and sequences whose keys lie in one run.

On a CPU the rows of every sequence attend by themselves (`ops.ragged_attention`): keys are read
where they lie, and neither their number nor the rows' is padded to that of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..ops import Share, fold_visible
from .pages import PageTable

if TYPE_CHECKING:
    from .step import Window


class Reach(NamedTuple):
    """One sequence's rows among packed ones, and the run of slots that they may read."""

    row: int
    start: int
    visible: torch.Tensor  # bool [m, L]
    query_position: torch.Tensor  # int64 [m]
    key_position: torch.Tensor  # int64 [L]

    def share(self, sliding_window: int | None, groups: int, dtype: torch.dtype) -> Share:
        """What `ops.ragged_attention` takes."""
        seen = self.visible[None], self.query_position[None], self.key_position[None]
        mask = fold_visible(windowed(*seen, sliding_window), groups, dtype)
        return Share(self.row, self.start, mask)


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


def find_reaches(
    table: PageTable, windows: Sequence[Window], position_R: torch.Tensor
) -> list[Reach] | None:
    """What every window may read where it lies.

    None for fewer than two sequences, and where a sequence's pages do not follow each other.
    """
    if len(windows) < 2:
        return None
    found, row = [], 0
    for window in windows:
        start = table.run_start(window.sequence)
        if start is None:
            return None
        count, _ = window.visible.shape
        visible = torch.cat([window.visible.new_ones(count, window.prefix), window.visible], dim=1)
        committed = torch.arange(window.prefix, device=position_R.device)
        key_position = torch.cat([committed, window.position])
        found.append(Reach(row, start, visible, position_R[row : row + count], key_position))
        row += count
    return found
