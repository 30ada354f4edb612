"""Kernels of `ops.rejection`.

q lives on C candidates, so only their part of p changes from trial to trial; every other token
keeps its share of the rest, which a single factor scales. One pass over the vocabulary for the
mass of the rest, one small program per row for the trials, one pass for the final draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sizes import ceil_div, power_of_2
from .coupled import BLOCK, race, winner
from .launch import wrap_triton
from .noise import gumbel, uniform


@triton.jit
def _is_candidate(v, token_ptr, logq_ptr, count):
    """Which tokens q gives a chance; a candidate that was warped away belongs to the rest."""
    found = v < 0
    for c in range(count):
        is_alive = tl.load(logq_ptr + c) > float("-inf")
        found = found | (v == tl.where(is_alive, tl.load(token_ptr + c), -1))
    return found


@triton.jit
def _mass_kernel(
    score_ptr, token_ptr, logq_ptr, top_ptr, rest_ptr, vocab, blocks, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    score = tl.load(score_ptr + row * vocab + v, mask=v < vocab, other=float("-inf"))
    broken = tl.sum(((score != score) | (score == float("inf"))).to(tl.int32), 0) > 0
    top = tl.where(broken, float("inf"), tl.max(score, 0)).to(tl.float64)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.exp(score.to(tl.float64) - base)
    candidate = _is_candidate(v, token_ptr + row * count, logq_ptr + row * count, count)
    mass = tl.where(candidate, 0.0, mass)
    tl.store(top_ptr + row * blocks + tl.program_id(1), top)
    tl.store(rest_ptr + row * blocks + tl.program_id(1), tl.sum(mass, 0))


@triton.jit
def _trial_kernel(
    score_ptr, accept_key_ptr, token_key_ptr, child_ptr, token_ptr, logq_ptr, top_ptr, rest_ptr,
    best_ptr, drawn_ptr, offset_ptr, chosen_ptr, refused_ptr, vocab, blocks, children, count,
    BLOCKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, BLOCKS)
    tops = tl.load(top_ptr + row * blocks + x, mask=x < blocks, other=float("-inf"))
    rests = tl.load(rest_ptr + row * blocks + x, mask=x < blocks, other=0.0)
    top = tl.max(tops, 0)
    is_law = (top > float("-inf")) & (top < float("inf"))
    base = tl.where(is_law, top, 0.0)
    rest = tl.sum(tl.where(tops > float("-inf"), rests * tl.exp(tops - base), 0.0), 0)
    c = tl.arange(0, COUNT)
    real = c < count
    logq = tl.load(logq_ptr + row * count + c, mask=real, other=float("-inf"))
    real = real & (logq > float("-inf"))
    token = tl.load(token_ptr + row * count + c, mask=real, other=-1)
    score = tl.load(score_ptr + row * vocab + token, mask=real, other=float("-inf"))
    p = tl.exp(score.to(tl.float64) - base)
    total = rest + tl.sum(p, 0)
    p = p / total
    scale = 1.0 / total  # of the tokens that are no candidates
    rest = rest * scale
    accept_key = tl.load(accept_key_ptr + row)
    chosen = row * 0 - 1
    refused = row * 0
    for k in range(children):
        child = tl.load(child_ptr + row * children + k)
        open_ = (chosen < 0) & (child >= 0)
        best = tl.max(logq, 0)
        q = tl.exp(logq - tl.where(best > float("-inf"), best, 0.0))
        q = q / tl.sum(q, 0)
        is_child = token == child
        ratio = tl.sum(tl.where(is_child, p, 0.0), 0) / tl.sum(tl.where(is_child, q, 0.0), 0)
        accepted = open_ & (uniform(accept_key, row * 0 + k) < ratio)
        residual = tl.maximum(p - q, 0.0)
        left = rest + tl.sum(residual, 0)
        # It vanishes by rounding only, where p and q are the same law.
        residual = tl.where(left > 0, residual, tl.where(is_child, 0.0, p))
        left = rest + tl.sum(residual, 0)
        goes_on = open_ & (accepted == 0)
        p = tl.where(goes_on, residual / left, p)
        scale = tl.where(goes_on, scale / left, scale)
        rest = tl.where(goes_on, rest / left, rest)
        refused_token = tl.where(goes_on, child, -1)
        logq = tl.where(token == refused_token, float("-inf"), logq)
        chosen = tl.where(accepted, child, chosen)
        refused += goes_on.to(tl.int64)
    key = tl.load(token_key_ptr + row)
    value = tl.where(p > 0, tl.log(p) + gumbel(key, token), float("-inf"))
    winner_value = tl.max(value, 0)
    drawn = tl.min(tl.where(value == winner_value, token, 1 << 62), 0)
    tl.store(best_ptr + row * (blocks + 1) + blocks, tl.where(is_law, winner_value, float("inf")))
    tl.store(drawn_ptr + row * (blocks + 1) + blocks, drawn)
    tl.store(offset_ptr + row, tl.log(scale) - base)
    tl.store(chosen_ptr + row, tl.where(is_law, chosen, -1))
    tl.store(refused_ptr + row, refused)


@triton.jit
def _rest_kernel(
    score_ptr, key_ptr, token_ptr, logq_ptr, offset_ptr, best_ptr, drawn_ptr,
    vocab, blocks, count, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    score = tl.load(score_ptr + row * vocab + v, mask=v < vocab, other=float("-inf"))
    candidate = _is_candidate(v, token_ptr + row * count, logq_ptr + row * count, count)
    fits = (v < vocab) & (candidate == 0)
    value = score.to(tl.float64) + tl.load(offset_ptr + row)
    key = tl.load(key_ptr + row)
    best, token = race(value, key, v, fits)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(best_ptr + row * (blocks + 1) + tl.program_id(1), best)
    tl.store(drawn_ptr + row * (blocks + 1) + tl.program_id(1), token)


@torch.library.triton_op("eagle4::rejection_rows", mutates_args=())
def _rejection_rows(
    score_RV: torch.Tensor,
    accept_key_R: torch.Tensor,
    token_key_R: torch.Tensor,
    child_RK: torch.Tensor,
    token_RC: torch.Tensor,
    logq_RC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, vocab), count = score_RV.shape, token_RC.shape[1]
    blocks = ceil_div(vocab, BLOCK)
    top, rest = (logq_RC.new_empty((rows, blocks)) for _ in range(2))
    best = logq_RC.new_empty((rows, blocks + 1))
    drawn = token_RC.new_empty((rows, blocks + 1))
    offset = logq_RC.new_empty((rows,))
    chosen, refused = (token_RC.new_empty((rows,)) for _ in range(2))
    wrap_triton(_mass_kernel)[(rows, blocks)](
        score_RV, token_RC, logq_RC, top, rest, vocab, blocks, count, BLOCK=BLOCK, num_warps=4
    )
    wrap_triton(_trial_kernel)[(rows,)](
        score_RV, accept_key_R, token_key_R, child_RK, token_RC, logq_RC, top, rest,
        best, drawn, offset, chosen, refused, vocab, blocks, child_RK.shape[1], count,
        BLOCKS=power_of_2(blocks), COUNT=power_of_2(count), num_warps=4,
    )  # fmt: skip
    wrap_triton(_rest_kernel)[(rows, blocks)](
        score_RV, token_key_R, token_RC, logq_RC, offset, best, drawn, vocab, blocks, count,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return torch.where(chosen >= 0, chosen, winner(best, drawn)), refused


def rejection_rows(
    score_RV: torch.Tensor,
    accept_key_R: torch.Tensor,
    token_key_R: torch.Tensor,
    child_RK: torch.Tensor,
    token_RC: torch.Tensor,
    logq_RC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ops.rejection.rejection_rows`; -1 where the scores are no law."""
    if not len(accept_key_R):
        return torch.zeros_like(accept_key_R), torch.zeros_like(accept_key_R)
    tensors = (score_RV, accept_key_R, token_key_R, child_RK, token_RC, logq_RC)
    return _rejection_rows(*(tensor.contiguous() for tensor in tensors))
