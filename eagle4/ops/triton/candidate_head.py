"""Kernels of `ops.candidate_head`.

maxima:  the largest score of every group of neighbouring tokens, from one pass over E
select:  the k largest of a short row, exactly, by bisection over the bits of the scores
rescore: the scores of all tokens in the chosen groups
exact:   logits of given tokens under the full head
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sizes import ceil_div, power_of_2
from .launch import wrap_triton
from .product import dot

MOST_GROUPS = 8192  # what one program of `select` holds
_BLOCK_R = 16


@triton.jit
def ordered(value):
    """uint32 keys in the order of float32 values; -0 and 0 are equal, NaN is the largest."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(value != value, 4294967295, key)


@triton.jit
def _maxima_kernel(
    low_ptr, up_ptr, best_ptr, rows, vocab, groups,
    RANK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    score = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for start in range(0, RANK, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        up_mask = (v < vocab)[None, :] & (d < RANK)[:, None]
        up = tl.load(up_ptr + v[None, :].to(tl.int64) * RANK + d[:, None], mask=up_mask, other=0.0)
        low_mask = (r < rows)[:, None] & (d < RANK)[None, :]
        low = tl.load(low_ptr + r[:, None] * RANK + d[None, :], mask=low_mask, other=0.0)
        score = dot(low, up, score, "ieee")
    # NaN is the largest, as in `block_topk`; a maximum would drop it.
    score = tl.where(score != score, float("inf"), score)
    score = tl.where((v < vocab)[None, :], score, float("-inf"))
    best = tl.max(tl.reshape(score, [BLOCK_R, BLOCK_V // GROUP, GROUP]), 2)
    g = tl.program_id(0) * (BLOCK_V // GROUP) + tl.arange(0, BLOCK_V // GROUP)
    best_ptr += r[:, None].to(tl.int64) * groups + g[None, :]
    tl.store(best_ptr, best, mask=(r < rows)[:, None] & (g < groups)[None, :])


@triton.jit
def _select_kernel(score_ptr, index_ptr, columns, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    score = tl.load(score_ptr + row * columns + column, mask=inside, other=0.0)
    key = tl.where(inside, ordered(score), 0)  # below every real key
    # The K-th largest key, from the highest bit down: as large as K keys allow.
    # Not unrolled: `torch.compile` looks for writes along every path of the unrolled graph.
    least = tl.zeros([1], tl.uint32)
    one = tl.full([1], 1, tl.uint32)
    for bit in range(32):
        higher = least | (one << (31 - bit))
        enough = tl.sum((key >= higher).to(tl.int32), 0) >= K
        least = tl.where(enough, higher, least)
    above = key > least
    ties = (key == least) & inside
    missing = K - tl.sum(above.to(tl.int32), 0)
    chosen = above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= missing))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index_ptr + row * K + place, column.to(tl.int64), mask=chosen)


@triton.jit
def _rescore_kernel(
    low_ptr, up_ptr, group_ptr, score_ptr, vocab, tokens,
    RANK: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.load(group_ptr + row * (tokens // GROUP) + t // GROUP, mask=t < tokens, other=0)
    v = group * GROUP + t % GROUP
    real = (t < tokens) & (v < vocab)
    score = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, RANK, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        low = tl.load(low_ptr + row * RANK + d, mask=d < RANK, other=0.0)
        up_mask = real[:, None] & (d < RANK)[None, :]
        up = tl.load(up_ptr + v[:, None] * RANK + d[None, :], mask=up_mask, other=0.0)
        score += tl.sum(up.to(tl.float32) * low.to(tl.float32)[None, :], 1)
    score = tl.where(real, score, float("-inf"))
    tl.store(score_ptr + row * tokens + t, score, mask=t < tokens)


@triton.jit
def _exact_kernel(
    weight_ptr, bias_ptr, hidden_ptr, token_ptr, logit_ptr, count, width, weight_v,
    HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    token = tl.load(token_ptr + row * count + c, mask=c < count, other=0)
    acc = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    for start in range(0, width, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        hidden = tl.load(hidden_ptr + row * width + h, mask=h < width, other=0.0)
        mask = (c < count)[:, None] & (h < width)[None, :]
        weight = tl.load(weight_ptr + token[:, None] * weight_v + h[None, :], mask=mask, other=0.0)
        acc += weight.to(tl.float32) * hidden.to(tl.float32)[None, :]
    logit = tl.sum(acc, 1)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + token, mask=c < count, other=0.0).to(tl.float32)
    tl.store(logit_ptr + row * count + c, logit, mask=c < count)


@torch.library.triton_op("eagle4::best_candidates", mutates_args=())
def _best_candidates(low_RD: torch.Tensor, up_VD: torch.Tensor, count: int) -> torch.Tensor:
    (rows, rank), vocab = low_RD.shape, up_VD.shape[0]
    group = group_size(vocab)
    groups, block_d = ceil_div(vocab, group), min(max(power_of_2(rank), 16), 128)
    best = low_RD.new_empty((rows, groups), dtype=torch.float32)
    grid = (ceil_div(vocab, 128), ceil_div(rows, _BLOCK_R))
    wrap_triton(_maxima_kernel)[grid](
        low_RD, up_VD, best, rows, vocab, groups,
        RANK=rank, GROUP=group, BLOCK_R=_BLOCK_R, BLOCK_V=128, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    chosen = min(count, groups)
    group_RG = low_RD.new_empty((rows, chosen), dtype=torch.int64)
    wrap_triton(_select_kernel)[(rows,)](
        best, group_RG, groups, K=chosen, BLOCK=power_of_2(groups), num_warps=8
    )
    tokens = chosen * group
    score = low_RD.new_empty((rows, tokens), dtype=torch.float32)
    wrap_triton(_rescore_kernel)[(rows, ceil_div(tokens, 32))](
        low_RD, up_VD, group_RG, score, vocab, tokens,
        RANK=rank, GROUP=group, BLOCK_T=32, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    index_RC = low_RD.new_empty((rows, count), dtype=torch.int64)
    wrap_triton(_select_kernel)[(rows,)](
        score, index_RC, tokens, K=count, BLOCK=power_of_2(tokens), num_warps=8
    )
    return group_RG.gather(1, index_RC // group) * group + index_RC % group


@torch.library.triton_op("eagle4::exact_logits", mutates_args=())
def _exact_logits(
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    hidden_RH: torch.Tensor,
    token_RC: torch.Tensor,
) -> torch.Tensor:
    rows, count = token_RC.shape
    logit = hidden_RH.new_empty((rows, count), dtype=torch.float32)
    wrap_triton(_exact_kernel)[(rows, ceil_div(count, 8))](
        weight_VH, weight_VH if bias_V is None else bias_V, hidden_RH, token_RC, logit,
        count, hidden_RH.shape[1], weight_VH.stride(0),
        HAS_BIAS=bias_V is not None, BLOCK_C=8, BLOCK_H=512, num_warps=4,
    )  # fmt: skip
    return logit


def group_size(vocab: int) -> int:
    """Neighbours that share a maximum: 16, or more where the maxima would not fit."""
    return max(16, power_of_2(ceil_div(vocab, MOST_GROUPS)))


def best_candidates(low_RD: torch.Tensor, up_VD: torch.Tensor, count: int) -> torch.Tensor:
    """As `ops.candidate_head.best_candidates`, from the weight ``[V, D]``."""
    if not len(low_RD):
        return low_RD.new_empty((0, count), dtype=torch.int64)
    return _best_candidates(low_RD.contiguous(), up_VD.contiguous(), count)


def exact_logits(
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    hidden_RH: torch.Tensor,
    token_RC: torch.Tensor,
) -> torch.Tensor:
    """As `ops.candidate_head.exact_logits`, from weight and bias."""
    if not token_RC.numel():
        return hidden_RH.new_empty(token_RC.shape, dtype=torch.float32)
    weight = weight_VH if weight_VH.stride(-1) == 1 else weight_VH.contiguous()
    return _exact_logits(weight, bias_V, hidden_RH.contiguous(), token_RC.contiguous())
