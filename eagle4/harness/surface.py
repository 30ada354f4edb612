"""A latency surface: nanoseconds over rows and context, measured on a grid.

More rows or a longer context never cost less, so measured grids are smoothed to be monotone in both
directions. Between grid points the surface is bilinear; beyond the grid it goes on with the slope
of the last segment; below it stays at the first point.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .monotone import non_decreasing


@dataclass
class Surface:
    """``ns[i][j]`` at ``rows[i]`` and ``contexts[j]``, both strictly increasing.

    ``spread[i][j]`` is half the interquartile range of the repetitions, in nanoseconds. Raises
    `ValueError` for a grid that is not rectangular, increasing, positive and finite.
    """

    rows: list[int]
    contexts: list[int]
    ns: list[list[float]]
    spread: list[list[float]] = field(default_factory=list)

    def __post_init__(self):
        for name in ("rows", "contexts"):
            axis = getattr(self, name)
            if not axis or any(b <= a for a, b in zip(axis, axis[1:], strict=False)):
                raise ValueError(f"{name} must be strictly increasing, got {axis}")
        if not self.spread:
            self.spread = [[0.0] * len(self.contexts) for _ in self.rows]
        for name in ("ns", "spread"):
            grid = getattr(self, name)
            shape = [len(line) for line in grid]
            if shape != [len(self.contexts)] * len(self.rows):
                raise ValueError(f"{name} must be {len(self.rows)} x {len(self.contexts)}")
        if not all(0 < value < 1e15 for line in self.ns for value in line):
            raise ValueError("latencies must be positive and finite")

    @classmethod
    def linear(cls, base_ns: float, row_ns: float, rows: Sequence[int] = (1, 64)) -> Surface:
        """``base + row * rows``, whatever the context."""
        return cls(list(rows), [1], [[base_ns + row_ns * r] for r in rows])

    def smoothed(self) -> Surface:
        """Non-decreasing along rows, then along contexts."""
        ones_rows, ones_contexts = [1.0] * len(self.rows), [1.0] * len(self.contexts)
        columns = [
            non_decreasing([line[j] for line in self.ns], ones_rows)
            for j in range(len(self.contexts))
        ]
        lines = [
            non_decreasing([column[i] for column in columns], ones_contexts)
            for i in range(len(self.rows))
        ]
        return Surface(self.rows, self.contexts, lines, self.spread)

    def at(self, rows: float, context: float) -> float:
        """Nanoseconds at any point."""
        i, u = _locate(self.rows, rows)
        j, v = _locate(self.contexts, context)
        low = _mix(self.ns[i], j, v)
        return low if u == 0 else low + u * (_mix(self.ns[i + 1], j, v) - low)

    def corners(self, rows: float, context: float) -> list[tuple[int, int, float]]:
        """Grid points around a point with their bilinear weights; at most four."""
        i, u = _locate(self.rows, rows)
        j, v = _locate(self.contexts, context)
        found = []
        for di, wi in ((0, 1 - u), (1, u)):
            for dj, wj in ((0, 1 - v), (1, v)):
                if wi * wj > 0:
                    found.append((i + di, j + dj, min(wi * wj, 1.0)))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rows": self.rows,
            "contexts": self.contexts,
            "ns": [[round(value) for value in line] for line in self.ns],
            "spread_ns": [[round(value) for value in line] for line in self.spread],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Surface:
        """Raises `ValueError`, `KeyError` or `TypeError` for what `to_dict` never wrote."""
        ns, spread = (
            [[float(v) for v in line] for line in values[name]] for name in ("ns", "spread_ns")
        )
        rows, contexts = ([int(v) for v in values[name]] for name in ("rows", "contexts"))
        return cls(rows, contexts, ns, spread)


def _locate(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Lower grid index and fraction; the fraction exceeds 1 beyond the grid."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    low = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return low, (value - axis[low]) / (axis[low + 1] - axis[low])


def _mix(line: Sequence[float], j: int, v: float) -> float:
    return line[j] if v == 0 else line[j] + v * (line[j + 1] - line[j])
