"""`eagle4.noise` inside kernels: the same bits, from the same integer arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(key, index):
    """Float64 in (0, 1): `noise.uniform` for int64 keys and indices."""
    value = (key + (index + 1) * -7046029254386353131).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * 13787848793156543929
    value = (value ^ (value >> 27)) * 10723151780598845931
    value = value ^ (value >> 31)
    return ((value >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def gumbel(key, token):
    """Float64 standard Gumbel noise: `noise.gumbel`."""
    return -tl.log(-tl.log(uniform(key, token)))
