"""Sizes that repeat: lengths and rows rounded up, so that recorded launches fit many rounds.

What is added is masked or repeats something real, and is never seen by anything real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ops.sizes import power_of_2

if TYPE_CHECKING:
    from .step import Window

LEAST_ENTRIES = 128  # of a context
MOST_ROWS = 65  # of a sequence; more keep a device busy whatever launches them


def bucket_length(length: int, bucketed: bool) -> int:
    """Of a context; as it is, unless ``bucketed``."""
    return max(power_of_2(length), LEAST_ENTRIES) if bucketed else length


def bucket_rows(rows: int) -> int:
    """A root and a power of two of nodes; as they are, beyond `MOST_ROWS`."""
    return rows if rows < 2 or rows > MOST_ROWS else 1 + power_of_2(rows - 1)


def repeat_first(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``[r, ...]`` to ``[count, ...]``."""
    added = rows[:1].expand(count - len(rows), *rows.shape[1:])
    return torch.cat([rows, added]) if len(added) else rows


def widen(window: Window, rows: int) -> Window:
    """With ``rows`` rows: the added ones repeat the first, written behind all the others.

    The window's rows must be its last entries, as they are in every step.
    """
    count = window.visible.shape[0]
    added, first = rows - count, window.position[window.offset]
    if not added:
        return window
    visible = torch.nn.functional.pad(window.visible, (0, added))
    position = torch.cat([window.position, first.expand(added)])
    return window._replace(position=position, visible=repeat_first(visible, rows))
