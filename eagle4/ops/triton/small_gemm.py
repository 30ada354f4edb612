"""Kernel of `ops.small_gemm`: a weight-streaming GEMM with programmatic dependent launch.

With PDL (sm_90 and later) the kernel may begin while its predecessor ends: the first tile of
weights, which no kernel of the round writes, is on its way before `gdc_wait` lets the program read
its rows. The launch option is not one that the compiler's Triton wrapper passes on, therefore the
op is opaque (`custom_op`) and launches itself; it is captured into CUDA graphs like any other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ..sizes import ceil_div, power_of_2
from .launch import opaque
from .product import dot


@triton.jit
def _weights(weight_ptr, n, k, columns, width, weight_n):
    return tl.load(
        weight_ptr + n[None, :].to(tl.int64) * weight_n + k[:, None],
        mask=(n < columns)[None, :] & (k < width)[:, None],
        other=0.0,
    )


@triton.jit
def _gemm_kernel(
    row_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, width, row_m, weight_n,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = _weights(weight_ptr, n, k, columns, width, weight_n)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row_ptr += m[:, None].to(tl.int64) * row_m + k[None, :]
    x = tl.load(row_ptr, mask=(m < rows)[:, None] & (k < width)[None, :], other=0.0)
    acc = dot(x, first, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), "ieee")
    for start in range(BLOCK_K, width, BLOCK_K):
        weight = _weights(weight_ptr, n, start + k, columns, width, weight_n)
        mask = (m < rows)[:, None] & (start + k < width)[None, :]
        x = tl.load(row_ptr + start, mask=mask, other=0.0)
        acc = dot(x, weight, acc, "ieee")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    out_ptr += m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(out_ptr, acc, mask=(m < rows)[:, None] & (n < columns)[None, :])


@torch.library.custom_op("eagle4::small_linear", mutates_args=())
def _small_linear(
    rows_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    (rows, width), columns = rows_MK.shape, weight_NK.shape[0]
    out = rows_MK.new_empty((rows, columns))
    sizes = tile_sizes(rows, rows_MK.element_size())
    uses_pdl = _has_pdl(rows_MK.device)
    options = {"launch_pdl": True} if uses_pdl else {}
    opaque(_gemm_kernel)[(ceil_div(columns, sizes["BLOCK_N"]),)](
        rows_MK, weight_NK, weight_NK if bias_N is None else bias_N, out,
        rows, columns, width, rows_MK.stride(0), weight_NK.stride(0),
        HAS_BIAS=bias_N is not None, PDL=uses_pdl, **sizes, **options,
    )  # fmt: skip
    return out


@_small_linear.register_fake
def _(rows_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    return rows_MK.new_empty((rows_MK.shape[0], weight_NK.shape[0]))


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    is_compiled = isinstance(_gemm_kernel, JITFunction)
    return is_compiled and torch.cuda.get_device_capability(device)[0] >= 9


def tile_sizes(rows: int, element_size: int) -> dict[str, Any]:
    """Narrow column tiles, so that few rows still fill the device; deep enough to stream."""
    sizes: dict[str, Any] = {"BLOCK_M": max(power_of_2(rows), 16), "BLOCK_N": 32}
    return sizes | {"BLOCK_K": 256 // element_size, "num_warps": 4, "num_stages": 4}


def small_linear(
    rows: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """As `ops.small_gemm.small_linear`, from weight and bias."""
    flat = rows.reshape(-1, rows.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    weight = weight_NK if weight_NK.stride(1) == 1 else weight_NK.contiguous()
    return _small_linear(flat, weight, bias_N).view(*rows.shape[:-1], weight_NK.shape[0])
