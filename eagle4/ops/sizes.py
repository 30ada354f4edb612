"""Integer arithmetic for tile and grid sizes."""

from __future__ import annotations


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``; 1 for 0.

    Comparisons only: a symbolic size is bounded by them, not fixed.
    """
    size = 1
    while size < number:
        size *= 2
    return size


def ceil_div(number: int, divisor: int) -> int:
    """``number / divisor``, rounded up."""
    return -(-number // divisor)
