"""What nodes beside the roots really take: a line, learned from the rounds themselves.

The grid of a quick measurement is coarse and its few repetitions are noisy; rows of one sequence
are not rows of eight; and a round with trees has work that a plain one has not, however small the
trees. Too steep or too flat a curve makes every round verify too few nodes or too many. Rounds
verify different numbers of nodes, so they show both parts:

    measured / plain = offset + slope * increment / plain

with a plain round and the increment as the table predicts them. A fading regression of what is
left after offset 1 and slope 1, always drawn a little to nothing: the offset, so that a machine
that is slow altogether shows in the table's factors and not here; the slope, because a load that
always verifies as many nodes says nothing about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

_MEMORY = 96  # rounds
_DOUBT = 24.0  # rounds without anything left that every line has besides
_PRIOR = 0.1  # rounds times variance of `increment / plain` that are half believed
_SLOPES = (0.4, 2.5)  # beyond this the measurement is wrong, not the line
_OFFSETS = (0.8, 2.0)
# A round counts as at most this far off. What stalls now and then would draw a mean up and not the
# medians that factors are, and the two would push each other away for ever.
_CLIP = 0.05
_STEP = 0.02  # changes below this are noise


class NodeLine:
    """The line of one batch size: ``offset`` in plain rounds, ``slope`` in predicted increments."""

    def __init__(self, sums: Sequence[float] = (0.0,) * 5) -> None:
        """``sums``: what another line has seen. Raises `ValueError` for what no line has."""
        if len(sums) != 5 or not all(map(isfinite, sums)) or min(sums[0], sums[3]) < 0:
            raise ValueError(f"a line has five finite sums, counts and squares >= 0, got {sums}")
        self.offset = self.slope = 1.0
        self._rounds, self._x, self._rest = sums[:3]  # number, means
        self._xx, self._xy = sums[3:]  # sums around the means
        self._update()

    @property
    def sums(self) -> list[float]:
        """What it has seen."""
        return [self._rounds, self._x, self._rest, self._xx, self._xy]

    def observe(self, increment: float, measured: float) -> bool:
        """One verification with nodes, in units of a predicted plain round; is the line another?

        ``increment``: what the table says that the nodes add, this line apart.
        """
        predicted = self.offset + self.slope * increment
        measured = min(max(measured, predicted / (1 + _CLIP)), predicted * (1 + _CLIP))
        rest = measured - (1 + increment)
        keep = 1 - 1 / _MEMORY
        self._rounds = self._rounds * keep + 1
        dx = increment - self._x
        self._x += dx / self._rounds
        self._rest += (rest - self._rest) / self._rounds
        self._xx = self._xx * keep + dx * (increment - self._x)
        self._xy = self._xy * keep + dx * (rest - self._rest)
        return self._update()

    def _update(self) -> bool:
        steeper = self._xy / (self._xx + _PRIOR)
        shrunk = self._rest * self._rounds / (self._rounds + _DOUBT)
        slope = _within(1 + steeper, _SLOPES)
        offset = _within(1 + shrunk - (slope - 1) * self._x, _OFFSETS)
        before, now = self.offset + self.slope * self._x, offset + slope * self._x
        if abs(now - before) < _STEP * before and abs(slope - self.slope) < _STEP * self.slope:
            return False
        self.offset, self.slope = offset, slope
        return True


def _within(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return min(max(value, low), high)
