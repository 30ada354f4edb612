"""The cost table: what every part of a round takes on this machine, in nanoseconds.

    verify   the target's forward by packed rows and context, rows of one sequence
    plain    a whole plain round by sequences and context
    root     the drafter's forward on verified rows, by rows and context
    level    one further drafter level by rows (sequences x width) and context
    finish   choosing and pruning by sequences

Verification of n nodes in a batch of B is priced as ``plain(B) + verify(B + n) - verify(B)`` at
first: what more sequences cost the host is in the first term, what more rows cost the target in the
others. A line per size of the batch is learned over both (`node_line`).

Measured once (`engine.measure`), then followed online: a group of surfaces that share a cause
(target, drafter, host) shares one factor, the median of the last measured / predicted ratios. A
machine that slows down therefore slows plain decoding and verification alike, although only one of
them is being measured. What that hides, plain decoding being cheaper than the table says next to
verification, shows in plain rounds between speculative ones (`compare_plain`). Shapes drift slowly,
one grid point at a time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from .node_line import NodeLine
from .surface import Surface

KINDS = ("verify", "plain", "root", "level", "finish")
GROUPS = {
    "verify": "target",
    "plain": "target",
    "root": "drafter",
    "level": "drafter",
    "finish": "host",
}
_WINDOW = 15  # measured ratios that a factor is the median of
_LEAST = 5  # ratios before a factor moves
_DEADBAND = 0.05  # factors closer to the old one than this are noise
_SHAPE_RATE = 0.02  # how fast a grid point follows what remains after the factor
_COMPARED = 5  # plain rounds between speculative ones that their ratio is the median of
_OFF = 1.5  # a factor beyond this speaks against the measurement
_STRAIGHT = NodeLine()  # of loads that never verified a node


class CostTable:
    """Latency surfaces of one setup, their factors, and the packed row counts that exist.

    ``buckets``: row counts that a verification is padded to (empty: any). ``fingerprint``: what the
    numbers were measured on. A ``frozen`` table ignores `refine`.
    """

    def __init__(
        self,
        surfaces: Mapping[str, Surface],
        *,
        buckets: tuple[int, ...] = (),
        fingerprint: Mapping[str, Any] | None = None,
        frozen: bool = False,
    ):
        missing = sorted(set(KINDS) - set(surfaces))
        if missing:
            raise ValueError(f"a cost table needs the surfaces {missing}")
        self.surfaces = {kind: surfaces[kind].smoothed() for kind in KINDS}
        self.buckets = tuple(sorted(buckets))
        self.fingerprint = dict(fingerprint or {})
        self.frozen = frozen
        self.factors = dict.fromkeys(sorted(set(GROUPS.values())), 1.0)
        self.version = 0  # changes whenever a predicted cost does
        # By size of the batch in bits: measured / predicted plain rounds, while speculating; and
        # what nodes add.
        self._compared: dict[int, deque[float]] = {}
        self._lines: dict[int, NodeLine] = {}
        self._ratios = {group: deque(maxlen=_WINDOW) for group in self.factors}
        self._curves: dict[tuple[int, int, int], list[int]] = {}

    def cost_ns(self, kind: str, rows: int, context: int) -> int:
        """Predicted nanoseconds of one part."""
        if kind == "verify":
            rows = self.bucket(rows)
        value = self._follow(kind, rows, context)
        if kind == "plain":
            value *= self.plain_ratio(rows)
        return max(1, int(value))

    def _follow(self, kind: str, rows: int, context: int) -> float:
        """A surface times the factor of its group."""
        return self.surfaces[kind].at(rows, context) * self.factors[GROUPS[kind]]

    def plain_ratio(self, num_sequences: int) -> float:
        """Plain rounds between speculative ones, measured over predicted; 1 when unknown."""
        ratios = self._compared.get(num_sequences.bit_length())
        return statistics.median(ratios) if ratios else 1.0

    def num_compared(self, num_sequences: int) -> int:
        """How often plain decoding was compared at this load, at most a handful."""
        return len(self._compared.get(num_sequences.bit_length(), ()))

    def compare_plain(self, num_sequences: int, context: int, measured_ns: int) -> None:
        """Learn what a plain round takes next to the speculative ones around it."""
        if self.frozen or measured_ns <= 0:
            return
        size = num_sequences.bit_length()
        ratios = self._compared.setdefault(size, deque(maxlen=_COMPARED))
        ratios.append(measured_ns / self._follow("plain", num_sequences, context))
        self.version += 1

    def bucket(self, rows: int) -> int:
        """The packed row count that ``rows`` are padded to."""
        return next((size for size in self.buckets if size >= rows), rows)

    def verify_curve(self, num_sequences: int, most: int, context: int) -> list[int]:
        """Verification cost with 0..``most`` nodes beside the roots, never decreasing.

        Contexts are rounded to 64, so that a curve serves many rounds.
        """
        context = (context + 32) // 64 * 64
        key = (num_sequences, context, self.version)
        curve = self._curves.get(key, [])
        if len(curve) <= most:  # a longer curve begins with every shorter one
            if len(self._curves) > 64:
                self._curves.clear()
            plain = int(self._follow("plain", num_sequences, context))
            line = self.node_line(num_sequences)
            added = self._added_ns(num_sequences, range(1, most + 1), context)
            curve = [plain, *(int(line.offset * plain + line.slope * ns) for ns in added)]
            curve = list(accumulate(curve, max))
            self._curves[key] = curve
        return curve[: most + 1]

    def node_line(self, num_sequences: int) -> NodeLine:
        """What nodes add at this load, next to what the surface says."""
        return self._lines.get(num_sequences.bit_length(), _STRAIGHT)

    def _added_ns(self, num_sequences: int, nodes: Iterable[int], context: int) -> list[int]:
        """What the surface says that so many nodes add."""
        base = self.cost_ns("verify", num_sequences, context)
        costs = (self.cost_ns("verify", num_sequences + n, context) for n in nodes)
        return [max(cost - base, 0) for cost in costs]

    def refine_verify(self, num_sequences: int, nodes: int, context: int, measured_ns: int) -> None:
        """Learn from a measured verification of ``nodes`` nodes in all."""
        if self.frozen or measured_ns <= 0:
            return
        rows = num_sequences + nodes
        curve = self.verify_curve(num_sequences, nodes, context)
        plain, predicted = curve[0], curve[-1]
        if nodes:
            line = self._lines.setdefault(num_sequences.bit_length(), NodeLine())
            added = self._added_ns(num_sequences, [nodes], context)[0]
            self.version += line.observe(added / plain, measured_ns / plain)
        # In proportion: the surface is corrected by the ratio that the whole was off by.
        own = self.cost_ns("verify", rows, context)
        self.refine("verify", rows, context, max(1, measured_ns * own // predicted))

    def refine(self, kind: str, rows: int, context: int, measured_ns: int) -> None:
        """Learn from one measured part of a round."""
        if self.frozen or measured_ns <= 0:
            return
        surface, group = self.surfaces[kind], GROUPS[kind]
        rows = self.bucket(rows) if kind == "verify" else rows
        ratio = measured_ns / surface.at(rows, context)
        ratios = self._ratios[group]
        ratios.append(ratio)
        if len(ratios) >= _LEAST:
            factor = statistics.median(ratios)
            if abs(factor / self.factors[group] - 1) > _DEADBAND:
                self.factors[group] = factor
                self.version += 1
        rest = ratio / self.factors[group]
        rest = min(max(rest, 1 - _DEADBAND), 1 + _DEADBAND)  # of stalls no more than of noise
        if len(ratios) == _WINDOW:
            for i, j, weight in surface.corners(rows, context):
                surface.ns[i][j] *= 1 + _SHAPE_RATE * weight * (rest - 1)

    def refine_plain(self, num_sequences: int, context: int, measured_ns: int) -> None:
        """Learn from a plain round among plain rounds."""
        ratio = self.plain_ratio(num_sequences)
        self.refine("plain", num_sequences, context, max(1, int(measured_ns / ratio)))

    def settle(self) -> None:
        """Restore monotonicity after online refinement; call it now and then, not every round."""
        if not self.frozen:
            self.surfaces = {kind: s.smoothed() for kind, s in self.surfaces.items()}
            self.version += 1

    @property
    def is_off(self) -> bool:
        """What rounds take is far from what was measured: the measurement was disturbed."""
        return not 1 / _OFF < self.factors["target"] < _OFF

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; factors are written for information and not read back."""
        return {
            "unit": "ns",
            "buckets": list(self.buckets),
            "fingerprint": self.fingerprint,
            "factors": {group: round(f, 4) for group, f in self.factors.items()},
            "surfaces": {kind: s.to_dict() for kind, s in self.surfaces.items()},
            "node_lines": {str(size): line.sums for size, line in self._lines.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, frozen: bool = False) -> CostTable:
        """Raises `ValueError`, `KeyError` or `TypeError` for what `to_dict` never wrote."""
        if values["unit"] != "ns":
            raise ValueError(f"a cost table in {values['unit']!r} is not understood; it must be ns")
        surfaces = {kind: Surface.from_dict(s) for kind, s in values["surfaces"].items()}
        table = cls(
            surfaces,
            buckets=tuple(int(size) for size in values["buckets"]),
            fingerprint=dict(values["fingerprint"]),
            frozen=frozen,
        )
        # Profiles of older versions have none.
        lines = values.get("node_lines", {})
        table._lines = {int(size): NodeLine([float(v) for v in s]) for size, s in lines.items()}
        return table
