"""The rows of one packed forward: what every sequence contributes and where rows are written."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .pages import PageTable


class Window(NamedTuple):
    """What one sequence contributes to a packed forward."""

    sequence: int  # row of the page table
    prefix: int  # committed entries, all visible
    offset: int  # window index of this step's first row; earlier entries are already stored
    position: torch.Tensor  # int64 [w] positions of all window entries, stored and new
    visible: torch.Tensor  # bool [n, w] which window entries each new row sees (itself included)


class AttentionStep:
    """Index tensors of one packed forward, shared by all layers.

    ``slot_R`` where rows are written, ``position_R`` their positions. What rows read is up to the
    two kinds of step, which differ in `attend`: `dense.DenseStep` gathers or views the keys of
    every sequence under one visibility matrix, `paged.PagedStep` leaves them where they are.
    """

    def __init__(self, table: PageTable, windows: list[Window], device: torch.device):
        rows = [window.visible.shape[0] for window in windows]
        slots: list[int] = []
        for window, count in zip(windows, rows, strict=True):
            first = window.prefix + window.offset
            slots += table.slots(window.sequence, first, first + count)
        self.slot_R = torch.tensor(slots, device=device)
        self.position_R = torch.cat(
            [w.position[w.offset : w.offset + w.visible.shape[0]] for w in windows]
        )
        self.pad_BM: torch.Tensor | None = None
        self.unpad_R: torch.Tensor | None = None
        if len(windows) > 1:
            self.pad_BM, self.unpad_R = _padding(rows, device)

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Packed ``[R, ...]`` to ``[B, M, ...]``; padding repeats a sequence's first row."""
        return rows.unsqueeze(0) if self.pad_BM is None else rows[self.pad_BM]

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """``[B, M, ...]`` back to packed ``[R, ...]``."""
        return padded.squeeze(0) if self.unpad_R is None else padded.flatten(0, 1)[self.unpad_R]

    def attend(
        self,
        query_RHD: torch.Tensor,
        keys_SHD: torch.Tensor,
        values_SHD: torch.Tensor,
        sliding_window: int | None,
        **options,
    ) -> torch.Tensor:
        """``[R, Hq, D]`` queries over pool tensors: ``[R, Hq, Dv]``."""
        raise NotImplementedError


def _padding(rows: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    most = max(rows)
    pad, unpad, first = [], [], 0
    for b, count in enumerate(rows):
        pad.append([first + i if i < count else first for i in range(most)])
        unpad += [b * most + i for i in range(count)]
        first += count
    return torch.tensor(pad, device=device), torch.tensor(unpad, device=device)
