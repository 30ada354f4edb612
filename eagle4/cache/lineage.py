"""Who descends from whom among the rows of one packed forward: what recurrent layers need of it.

Rows are padded to ``[B, M]`` as in `AttentionStep`; a padding row descends from itself alone.
Everything is made when the first recurrent layer asks and shared by all layers.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..ops import TreePaths, conv_sources

if TYPE_CHECKING:
    from .step import Window

SNAPSHOT_BLOCK = 64  # recurrent state is kept at multiples of this many tokens


class Lineage:
    """Ancestry of the rows of ``windows``, packed in their order.

    ``is_prompt``: every window is a chain of prompt tokens, committed as it runs.
    """

    def __init__(self, windows: list[Window], is_prompt: bool):
        self.is_prompt = is_prompt
        self.sequences = [window.sequence for window in windows]
        self.prefixes = [window.prefix for window in windows]
        self.counts = [window.visible.shape[0] for window in windows]
        self.first_rows = [sum(self.counts[:b]) for b in range(len(windows))]
        self._visible = [window.visible for window in windows]
        self._sources: dict[int, torch.Tensor] = {}

    @cached_property
    def ancestors_BMM(self) -> torch.Tensor:
        """bool, (i, j): j is i or an ancestor of i."""
        most = max(self.counts)
        device = self._visible[0].device
        ancestors = torch.eye(most, dtype=torch.bool, device=device).repeat(len(self.counts), 1, 1)
        for b, (count, visible) in enumerate(zip(self.counts, self._visible, strict=True)):
            ancestors[b, :count, :count] = visible
        return ancestors

    @cached_property
    def paths(self) -> TreePaths:
        return TreePaths(self.ancestors_BMM)

    def sources(self, width: int) -> torch.Tensor:
        """See `ops.conv_sources`."""
        if width not in self._sources:
            self._sources[width] = conv_sources(self.ancestors_BMM, width)
        return self._sources[width]

    @cached_property
    def slot_B(self) -> torch.Tensor:
        """The sequences as int64, where the rows are."""
        return torch.tensor(self.sequences, device=self._visible[0].device)

    @property
    def slots(self) -> slice | list[int]:
        """The sequences as a slice where they follow each other, so that reading is no copy."""
        return as_slice(self.sequences)

    @property
    def snapshot_row(self) -> int | None:
        """Rows of a prompt before its last block boundary that leaves one row to run."""
        if not self.is_prompt or len(self.counts) > 1:
            return None
        prefix, count = self.prefixes[0], self.counts[0]
        row = (prefix + count - 1) // SNAPSHOT_BLOCK * SNAPSHOT_BLOCK - prefix
        return row if row > 0 else None


def as_slice(numbers: list[int]) -> slice | list[int]:
    """A run of numbers as a slice, others as they are."""
    first, last = numbers[0], numbers[-1]
    is_run = numbers == list(range(first, last + 1))
    return slice(first, last + 1) if is_run else numbers
