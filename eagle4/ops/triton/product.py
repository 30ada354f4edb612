"""The matrix product of all kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a b`` with float32 sums; float32 factors are not rounded to TF32."""
    # The interpreter multiplies the bits of bf16 numbers as integers.
    if _IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
