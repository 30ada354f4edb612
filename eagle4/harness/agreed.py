"""`AgreedTable`: one cost table for ranks that each measure their own times.

Decisions read predicted costs only, so ranks with equal tables decide alike without a word. The
tables start as the element-wise maximum (a round takes as long as its slowest rank); what is
measured afterwards is kept back and applied by all ranks after the same round, again as maxima.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from .cost import CostTable
from .surface import Surface

AGREE_ROUNDS = 8  # rounds between two exchanges of measured times


class AgreedTable(CostTable):
    """The slowest of ``tables``. ``largest`` gives the maxima of a list of integers over all ranks.

    Every rank must report the same parts in the same order, which it does as long as it decides as
    the others do. Raises `ValueError` for tables that were measured on different grids.
    """

    def __init__(self, tables: Sequence[CostTable], largest: Callable[[list[int]], list[int]]):
        first = tables[0]
        surfaces = {
            kind: _slowest(kind, [table.surfaces[kind] for table in tables])
            for kind in first.surfaces
        }
        super().__init__(
            surfaces,
            buckets=first.buckets,
            fingerprint=first.fingerprint,
            frozen=any(table.frozen for table in tables),
        )
        self._lines = copy.deepcopy(first._lines)  # as good as any, and the same for all
        self._largest = largest
        self._held: list[tuple[str, tuple[Any, ...], int]] = []  # method, arguments, measured
        self._applies = False
        self._rounds = 0

    def refine(self, kind: str, rows: int, context: int, measured_ns: int) -> None:
        """Held back until the ranks exchange what they measured."""
        if self._applies:
            super().refine(kind, rows, context, measured_ns)
        else:
            self._hold("refine", (kind, rows, context), measured_ns)

    def refine_verify(self, num_sequences: int, nodes: int, context: int, measured_ns: int) -> None:
        """Held back as well; the end of a round."""
        self._end_round("refine_verify", (num_sequences, nodes, context), measured_ns)

    def refine_plain(self, num_sequences: int, context: int, measured_ns: int) -> None:
        """Held back as well; the end of a round."""
        self._end_round("refine_plain", (num_sequences, context), measured_ns)

    def compare_plain(self, num_sequences: int, context: int, measured_ns: int) -> None:
        """Held back as well; the end of a round."""
        self._end_round("compare_plain", (num_sequences, context), measured_ns)

    def _hold(self, method: str, arguments: tuple[Any, ...], measured_ns: int) -> None:
        if not self.frozen:
            self._held.append((method, arguments, measured_ns))

    def _end_round(self, method: str, arguments: tuple[Any, ...], measured_ns: int) -> None:
        """Every round ends with exactly one of three reports."""
        self._hold(method, arguments, measured_ns)
        self._rounds += 1
        if self._rounds % AGREE_ROUNDS == 0 and self._held:
            held, self._held = self._held, []
            slowest = self._largest([ns for _, _, ns in held])
            self._applies = True
            for (method, arguments, _), ns in zip(held, slowest, strict=True):
                getattr(CostTable, method)(self, *arguments, ns)
            self._applies = False


def _slowest(kind: str, surfaces: Sequence[Surface]) -> Surface:
    first = surfaces[0]
    if any((s.rows, s.contexts) != (first.rows, first.contexts) for s in surfaces):
        raise ValueError(f"the ranks measured {kind!r} on different grids; measure it again")
    grids = [s.ns for s in surfaces]
    ns = [[max(cell) for cell in zip(*lines, strict=True)] for lines in zip(*grids, strict=True)]
    return Surface(first.rows, first.contexts, ns, first.spread)
