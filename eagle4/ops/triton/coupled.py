"""Kernel of `ops.coupled`: the best noisy score of every block of the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sizes import ceil_div
from .launch import wrap_triton
from .noise import gumbel

BLOCK = 1024


@triton.jit
def race(score, key, v, fits):
    """(best ``score + g``, its token) over a block in float64; -inf where nothing fits."""
    value = score.to(tl.float64) + gumbel(key, v)
    # A certain loser is out: the noise is finite, but -inf must not meet NaN.
    value = tl.where(fits & (score > float("-inf")), value, float("-inf"))
    best = tl.max(value, 0)
    token = tl.min(tl.where(value == best, v, 1 << 62), 0)
    return best, token


@triton.jit
def _race_kernel(score_ptr, key_ptr, best_ptr, token_ptr, vocab, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    score = tl.load(score_ptr + row * vocab + v, mask=v < vocab, other=float("-inf"))
    key = tl.load(key_ptr + row)
    best, token = race(score, key, v, v < vocab)  # pyright: ignore[reportGeneralTypeIssues]
    # NaN and +inf are no law: they win, and are seen.
    broken = tl.sum(((score != score) | (score == float("inf"))).to(tl.int32), 0) > 0
    tl.store(best_ptr + row * blocks + tl.program_id(1), tl.where(broken, float("inf"), best))
    tl.store(token_ptr + row * blocks + tl.program_id(1), token)


@torch.library.triton_op("eagle4::coupled_rows", mutates_args=())
def _coupled_rows(score_RV: torch.Tensor, key_R: torch.Tensor) -> torch.Tensor:
    rows, vocab = score_RV.shape
    blocks = ceil_div(vocab, BLOCK)
    best = score_RV.new_empty((rows, blocks), dtype=torch.float64)
    token = key_R.new_empty((rows, blocks))
    wrap_triton(_race_kernel)[(rows, blocks)](
        score_RV, key_R, best, token, vocab, blocks, BLOCK=BLOCK, num_warps=4
    )
    return winner(best, token)


def winner(best_RX: torch.Tensor, token_RX: torch.Tensor) -> torch.Tensor:
    """The token of every row's best part, -1 where the best is not finite."""
    top_R, place_R = best_RX.max(dim=1)
    token_R = token_RX.gather(1, place_R.unsqueeze(1)).squeeze(1)
    return torch.where(top_R.isfinite(), token_R, -1)


def coupled_rows(score_RV: torch.Tensor, key_R: torch.Tensor) -> torch.Tensor:
    """As `ops.coupled.coupled_rows`; -1 where the scores are no law."""
    if not len(key_R):
        return torch.zeros_like(key_R)
    return _coupled_rows(score_RV.contiguous(), key_R.contiguous())
