"""Fixed-point probabilities: int64 in units of 2^-30, exact on every device.

Every decision is made in integers (nanoseconds and these), so that readable Python, tensor code and
kernels agree bit for bit. Products of two probabilities and of a probability with at most `MOST_NS`
fit into an int64.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

BITS = 30
ONE = 1 << BITS
MOST_NS = 1 << 32  # the largest price of a token, 4.3 s: times ONE it still fits
DEPTHS = 8  # depths with an acceptance of their own; deeper ones share the last

# Draft probabilities at which acceptance is tabulated; dense where it matters.
KNOTS = tuple(
    round(p * ONE)
    for p in (
        *(0, 0.005, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
        *(0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1),
    )
)
CELLS = len(KNOTS) - 1


def cell(prob_q30: int) -> int:
    """The interval between two knots that holds a probability."""
    return min(max(bisect_right(KNOTS, prob_q30) - 1, 0), CELLS - 1)


def interpolate(values_q30: Sequence[int], prob_q30: int) -> int:
    """A non-decreasing function given at the knots, at a probability."""
    i = cell(prob_q30)
    low, high = values_q30[i], values_q30[i + 1]
    inside = min(max(prob_q30 - KNOTS[i], 0), KNOTS[i + 1] - KNOTS[i])
    return low + (high - low) * inside // (KNOTS[i + 1] - KNOTS[i])


def multiply(a_q30: int, b_q30: int) -> int:
    """Product of two probabilities."""
    return a_q30 * b_q30 >> BITS


def depth_class(depth: int) -> int:
    """Row of a table by depth: depth 1 is row 0."""
    return min(depth, DEPTHS) - 1
