"""Kernels of `ops.paged_attention`: rows over their keys in parts, then a merge of the parts.

A program takes one KV head of one sequence, a block of its rows (all query heads that share the KV
head, folded) and one part of the entries. Parts cover prefix and window alike, so they are equally
long; a part's result is normalised and carries its log-sum-exp in base 2. With one part the first
kernel writes the output itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..paged_attention import PagedView
from ..sizes import ceil_div, power_of_2
from .launch import wrap_triton
from .product import dot

# Programs that fill the largest GPUs about twice; parts beyond that only cost merging.
PROGRAMS = 264
MOST_SPLITS = 32
LEAST_PART = 256  # entries
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(score, softcap):
    # tanh(x) = 2 sigmoid(2 x) - 1
    return softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)


@triton.jit
def _attend_kernel(
    query_ptr, key_ptr, value_ptr, page_ptr, prefix_ptr, bits_ptr, position_ptr, window_ptr,
    sink_ptr, out_ptr, lse_ptr,
    rows, window, words, pages, heads, scale, softcap,
    query_b, query_m, query_h, key_s, key_h, value_s, value_h,
    SLIDING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_heads = heads // GROUPS
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv = tl.program_id(1) % kv_heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < rows * GROUPS
    m = row // GROUPS
    head = kv * GROUPS + row % GROUPS
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    query_ptr += b * query_b + m[:, None] * query_m + head[:, None] * query_h + d[None, :]
    query = tl.load(query_ptr, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    prefix = tl.load(prefix_ptr + b)
    position = tl.load(position_ptr + b * rows + m, mask=inside, other=1 << 40)
    first = prefix * 0
    if SLIDING > 0:
        first = tl.minimum(tl.maximum(tl.min(position, 0) - (SLIDING - 1), 0), prefix)
    part = tl.cdiv(tl.cdiv(prefix + window - first, SPLITS), BLOCK_N) * BLOCK_N
    begin = first + tl.program_id(2) * part
    end = tl.minimum(begin + part, prefix + window)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for stage in tl.static_range(2):  # the prefix, then the window
        low = begin if stage == 0 else tl.maximum(begin, prefix)
        high = tl.minimum(end, prefix) if stage == 0 else end
        for start in range(low, high, BLOCK_N):
            entry = start + n
            here = entry < high
            page = tl.load(page_ptr + b * pages + entry // PAGE, mask=here, other=0)
            slot = page * PAGE + entry % PAGE
            key = tl.load(
                key_ptr + slot[None, :] * key_s + kv * key_h + d[:, None],
                mask=here[None, :] & (d < D)[:, None],
                other=0.0,
            )
            score = dot(query, key, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION) * scale
            if HAS_SOFTCAP:
                score = _capped(score, softcap)
            seen = inside[:, None] & here[None, :]
            key_position = entry
            if stage == 1:
                j = entry - prefix
                word_ptr = bits_ptr + (b * rows + m[:, None]) * words + (j // 64)[None, :]
                word = tl.load(word_ptr, mask=seen, other=0)
                seen = seen & (((word >> (j % 64)[None, :]) & 1) != 0)
                key_position = tl.load(window_ptr + b * window + j, mask=here, other=0)
            if SLIDING > 0:
                seen = seen & (position[:, None] - key_position[None, :] < SLIDING)
            score = tl.where(seen, score * _LOG2E, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            # A row that has seen nothing yet keeps -inf, and -inf - -inf is NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - base[:, None])
            shrink = tl.exp2(top - base)
            value = tl.load(
                value_ptr + slot[:, None] * value_s + kv * value_h + dv[None, :],
                mask=here[:, None] & (dv < DV)[None, :],
                other=0.0,
            )
            acc = dot(weight.to(value.dtype), value, acc * shrink[:, None], PRECISION)
            total = total * shrink + tl.sum(weight, 1)
            top = new_top
    place = (b * rows + m) * heads + head
    fits = inside[:, None] & (dv < DV)[None, :]
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32) * _LOG2E
            base = tl.maximum(top, sink)
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.exp2(sink - base)
            acc = acc * shrink[:, None]
        acc = acc / total[:, None]
        tl.store(out_ptr + place[:, None] * DV + dv[None, :], acc, mask=fits)
    else:
        place += tl.program_id(2).to(tl.int64) * (tl.num_programs(1) // kv_heads) * rows * heads
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + place[:, None] * DV + dv[None, :], acc, mask=fits)
        tl.store(lse_ptr + place, tl.where(total > 0, top + tl.log2(total), top), mask=inside)


@triton.jit
def _merge_kernel(
    part_ptr, lse_ptr, sink_ptr, out_ptr, total_rows, heads,
    HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    dv = tl.arange(0, BLOCK_DV)
    place = split * total_rows + row
    lse = tl.load(lse_ptr + place, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sink_ptr + row % heads).to(tl.float32) * _LOG2E
        top = tl.maximum(top, sink)
    weight = tl.exp2(lse - top)
    total = tl.sum(weight, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    fits = (split < SPLITS)[:, None] & (dv < DV)[None, :]
    part = tl.load(part_ptr + place[:, None] * DV + dv[None, :], mask=fits, other=0.0)
    out = tl.sum(part * weight[:, None], 0) / total
    tl.store(out_ptr + row * DV + dv, out, mask=dv < DV)


@torch.library.triton_op("eagle4::paged_attention", mutates_args=())
def _paged_attention(
    query_BMHD: torch.Tensor,
    key_SHD: torch.Tensor,
    value_SHD: torch.Tensor,
    page_BP: torch.Tensor,
    prefix_B: torch.Tensor,
    bits_BMX: torch.Tensor,
    query_position_BM: torch.Tensor,
    window_position_BW: torch.Tensor,
    sinks_H: torch.Tensor | None,
    page_size: int,
    scale: float,
    sliding_window: int,
    softcap: float,
    num_splits: int,
) -> torch.Tensor:
    batch, rows, heads, width = query_BMHD.shape
    kv_heads, width_v = value_SHD.shape[1:]
    sizes = tile_sizes(rows * (heads // kv_heads), width, width_v, key_SHD.element_size())
    blocks = ceil_div(rows * (heads // kv_heads), sizes["BLOCK_M"])
    out = query_BMHD.new_empty((batch, rows, heads, width_v))
    part, lse = out, query_position_BM
    if num_splits > 1:
        part = query_BMHD.new_empty((num_splits, *out.shape), dtype=torch.float32)
        lse = query_BMHD.new_empty((num_splits, batch, rows, heads), dtype=torch.float32)
    sinks = query_BMHD if sinks_H is None else sinks_H
    wrap_triton(_attend_kernel)[(blocks, batch * kv_heads, num_splits)](
        query_BMHD, key_SHD, value_SHD, page_BP, prefix_B, bits_BMX, query_position_BM,
        window_position_BW, sinks, part, lse,
        rows, window_position_BW.shape[1], bits_BMX.shape[2], page_BP.shape[1], heads,
        scale, softcap,
        *query_BMHD.stride()[:3], *key_SHD.stride()[:2], *value_SHD.stride()[:2],
        SLIDING=sliding_window, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks_H is not None,
        GROUPS=heads // kv_heads, PAGE=page_size, D=width, DV=width_v, SPLITS=num_splits,
        PRECISION=product_precision(query_BMHD.dtype), **sizes,
    )  # fmt: skip
    if num_splits > 1:
        wrap_triton(_merge_kernel)[(batch * rows * heads,)](
            part, lse, sinks, out, batch * rows * heads, heads,
            HAS_SINKS=sinks_H is not None, SPLITS=num_splits, BLOCK_S=power_of_2(num_splits),
            DV=width_v, BLOCK_DV=power_of_2(width_v),
        )  # fmt: skip
    return out


def tile_sizes(folded_rows: int, width: int, width_v: int, element_size: int) -> dict[str, Any]:
    """Tile sizes and warps: what keeps one program's tiles in registers and shared memory."""
    row_bytes = max(width, width_v) * element_size
    most_m = 64 if row_bytes <= 256 else 32 if element_size < 4 else 16
    block_m = min(max(power_of_2(folded_rows), 16), most_m)
    block_n = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    sizes: dict[str, Any] = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    sizes |= {"BLOCK_D": max(power_of_2(width), 16), "BLOCK_DV": max(power_of_2(width_v), 16)}
    num_warps = 4 if block_m <= 16 and row_bytes <= 256 else 8
    return sizes | {"num_warps": num_warps, "num_stages": 2}


def product_precision(dtype: torch.dtype) -> str:
    """Three TF32 products make one of float32 without holding whole rows in registers."""
    is_nvidia = torch.version.hip is None
    return "tf32x3" if dtype == torch.float32 and is_nvidia else "ieee"


def default_splits(programs: int, entries: int) -> int:
    """Parts (a power of two) that fill the device, none much shorter than `LEAST_PART` entries."""
    splits = 1
    while splits < MOST_SPLITS and splits * programs < PROGRAMS and splits * LEAST_PART < entries:
        splits *= 2
    return splits


def paged_attention(
    query_BMHD: torch.Tensor,
    key_SHD: torch.Tensor,
    value_SHD: torch.Tensor,
    view: PagedView,
    page_size: int,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """As `ops.paged_attention.paged_attention`; ``num_splits`` parts (None: as many as pay)."""
    batch, _, heads, width = query_BMHD.shape
    if num_splits is None:
        reach = view.page_BP.shape[1] * page_size
        if sliding_window is not None:
            reach = min(reach, sliding_window + view.window_position_BW.shape[1])
        num_splits = default_splits(batch * key_SHD.shape[1], reach)
    tensors = [t if t.stride(-1) == 1 else t.contiguous() for t in (query_BMHD, key_SHD, value_SHD)]
    return _paged_attention(
        *tensors,
        *(tensor.contiguous() for tensor in view),
        sinks_H=sinks_H,
        page_size=page_size,
        scale=float(width) ** -0.5 if scale is None else scale,
        sliding_window=sliding_window or 0,
        softcap=softcap or 0.0,
        num_splits=num_splits,
    )
