"""Integer arithmetic for tile and grid sizes."""

from __future__ import annotations


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """``number / divisor``, rounded up."""
    return -(-number // divisor)
