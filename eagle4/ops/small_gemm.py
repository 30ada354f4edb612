"""``x W^T + b`` for few rows, which costs what reading W costs."""

from __future__ import annotations

import torch
from torch import nn

from .dispatch import is_stock, wants_triton

MOST_ROWS = 64


def small_linear(rows: torch.Tensor, linear: nn.Linear, impl: str = "auto") -> torch.Tensor:
    """``[..., K]`` to ``[..., N]``: what ``linear`` computes, at most 64 rows in the kernel.

    On devices with programmatic dependent launch (sm_90 and later) the kernel starts to read
    weights before the kernel that makes its rows has ended; so nothing may be writing weights.
    The reference calls the module, so packed CPU weights serve it.
    """
    weight_NK = linear.weight

    def fits() -> bool:
        is_few = 0 < rows.numel() <= MOST_ROWS * rows.shape[-1]
        return is_few and rows.dtype == weight_NK.dtype and is_stock(linear)

    if wants_triton(impl, rows, weight_NK, fits=fits):
        from .triton.small_gemm import small_linear as kernel

        return kernel(rows, weight_NK, linear.bias)
    return linear(rows)
