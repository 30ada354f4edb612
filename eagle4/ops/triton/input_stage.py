"""Kernel of `ops.input_stage`: norms and projection in one pass over parts and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..sizes import ceil_div, power_of_2
from .launch import wrap_triton
from .product import dot


@triton.jit
def _stage_kernel(
    part0, part1, part2, part3, gain0, gain1, gain2, gain3, weight_ptr, out_ptr,
    rows, width, columns, stride0, stride1, stride2, stride3, weight_n, eps,
    PARTS: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in tl.static_range(PARTS):
        part_ptr = part0 if part == 0 else part1 if part == 1 else part2 if part == 2 else part3
        gain_ptr = gain0 if part == 0 else gain1 if part == 1 else gain2 if part == 2 else gain3
        stride = stride0 if part == 0 else stride1 if part == 1 else stride2 if part == 2 else stride3  # noqa: E501 # fmt: skip
        inner = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        for start in range(0, width, BLOCK_K):
            here = start + k < width
            weight = tl.load(
                weight_ptr + n[None, :].to(tl.int64) * weight_n
                + (part * width + start + k)[:, None],
                mask=(n < columns)[None, :] & here[:, None],
                other=0.0,
            )  # fmt: skip
            x = tl.load(
                part_ptr + m[:, None].to(tl.int64) * stride + (start + k)[None, :],
                mask=(m < rows)[:, None] & here[None, :],
                other=0.0,
            )
            if HAS_NORM:
                gain = tl.load(gain_ptr + start + k, mask=here, other=0.0)
                wide = x.to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                x = (wide * gain.to(tl.float32)[None, :]).to(x.dtype)
            inner = dot(x, weight, inner, "ieee")
        if HAS_NORM:
            inner = inner * tl.rsqrt(squares / width + eps)[:, None]
        acc += inner
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(out_ptr + m[:, None].to(tl.int64) * columns + n[None, :], acc, mask=mask)


@torch.library.triton_op("eagle4::normed_linear", mutates_args=())
def _normed_linear(
    parts: list[torch.Tensor], gains: list[torch.Tensor], weight_NK: torch.Tensor, eps: float
) -> torch.Tensor:
    (rows, width), columns = parts[0].shape, weight_NK.shape[0]
    out = parts[0].new_empty((rows, columns))
    part = [*parts, *([parts[0]] * 4)][:4]
    gain = [*gains, *([parts[0]] * 4)][:4]
    sizes = tile_sizes(rows, parts[0].element_size())
    grid = (ceil_div(columns, sizes["BLOCK_N"]), ceil_div(rows, sizes["BLOCK_M"]))
    wrap_triton(_stage_kernel)[grid](
        *part, *gain, weight_NK, out,
        rows, width, columns, *(tensor.stride(0) for tensor in part), weight_NK.stride(0), eps,
        PARTS=len(parts), HAS_NORM=bool(gains), **sizes,
    )  # fmt: skip
    return out


def tile_sizes(rows: int, element_size: int) -> dict[str, Any]:
    """Narrow column tiles, so that few rows still fill the device; deep enough to stream."""
    block_m = min(max(power_of_2(rows), 16), 64)
    sizes: dict[str, Any] = {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 256 // element_size}
    return sizes | {"num_warps": 4, "num_stages": 4}


def normed_linear(
    parts: Sequence[torch.Tensor],
    gains: Sequence[torch.Tensor],
    weight_NK: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """As `ops.input_stage.normed_linear`, from gains ``[W]`` (or none) and the weight."""
    shape, width = parts[0].shape[:-1], parts[0].shape[-1]
    flat = [part.reshape(-1, width) for part in parts]
    flat = [part if part.stride(1) == 1 else part.contiguous() for part in flat]
    weight = weight_NK if weight_NK.stride(1) == 1 else weight_NK.contiguous()
    found = _normed_linear(flat, [gain.contiguous() for gain in gains], weight, eps)
    return found.view(*shape, weight_NK.shape[0])
