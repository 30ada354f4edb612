"""Equally many rows for every sequence where launches are replayed, so that shapes repeat.

What is added repeats a sequence's first row and writes behind its window, where nothing is kept;
no other row sees it. Results of added rows are left out again.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from ..cache import Window
from ..cache.buckets import MOST_ROWS, bucket_rows, repeat_first, widen
from .state import State


class Rows(NamedTuple):
    """Packed rows of several sequences, and where each one's own begin."""

    windows: list[Window]
    columns: list[torch.Tensor]  # [R, ...] of every kind: tokens, features
    first: list[int]
    own_R: torch.Tensor | None  # which rows are no additions; None: all


def pack(
    state: State, windows: list[Window], *columns: list[torch.Tensor], is_even: bool = True
) -> Rows:
    """Rows of the ``windows``; ``columns``: of every kind one ``[rows, ...]`` per window.

    Without ``is_even`` nothing is added, however launches go.
    """
    counts = [window.visible.shape[0] for window in windows]
    most = bucket_rows(max(counts))
    if state.graphs.replays is None or not is_even or most > MOST_ROWS:
        first = [0, *accumulate(counts[:-1])]
        return Rows(windows, [torch.cat(parts) for parts in columns], first, None)
    for window in windows:
        state.reserve(state.sequences[window.sequence], window.prefix + window.offset + most)
    first = [b * most for b in range(len(windows))]
    own = None
    if any(count < most for count in counts):
        rows = [start + i for start, n in zip(first, counts, strict=True) for i in range(n)]
        own = torch.tensor(rows, device=state.device)
    packed = [torch.cat([repeat_first(part, most) for part in parts]) for parts in columns]
    return Rows([widen(window, most) for window in windows], packed, first, own)
