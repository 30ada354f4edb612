"""Counter-based noise: a pure function of (seed, stream, purpose, position, token).

Nothing is consumed, so the noise of a token does not depend on how many others were looked at, in
which order, in which batch or in which tree. The bits come from integer arithmetic (the finaliser
of SplitMix64; Steele, Lea and Flood 2014) and are the same on every device; the two logarithms
behind them are float64.

With g Gumbel noise, ``argmax(log p + g)`` is a draw from p, and the k largest of ``log p + g``, in
order, are k draws without replacement (Vieira 2014; Kool et al. 2019).
"""

from __future__ import annotations

from enum import IntEnum

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Purpose(IntEnum):
    """What noise is for; different purposes are independent."""

    TOKEN = 1  # the target's own token
    DRAFT = 2  # draws of the drafter that the target must not share
    ACCEPT = 3  # uniform numbers of the acceptance test


def stream_key(seed: int, stream: int) -> int:
    """The 64-bit key of one sequence."""
    return _mix_int(_mix_int(seed & _MASK) + stream)


def position_key(key: int, purpose: Purpose, position: int) -> int:
    """The key of one position of a sequence, as a signed 64-bit integer."""
    key = _mix_int(_mix_int(key + int(purpose)) + position)
    return _signed(key)


def uniform(key: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Float64 in (0, 1), one for every index; ``key`` broadcasts against ``index``."""
    bits = _mix(key + (index + 1) * _signed(_GOLDEN))
    # 52 bits and a half: the largest value is the largest float64 below 1.
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52


def gumbel(key: int | torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Float64 standard Gumbel noise, one value for every token id."""
    return uniform(key, token).log_().neg_().log_().neg_()


def _mix_int(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """`_mix_int` without its increment; int64 products wrap."""
    value = (value ^ _shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _shift(value, 27)) * _signed(_SECOND)
    return value ^ _shift(value, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
