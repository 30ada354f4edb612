"""Kernel of `ops.divergence`: one program per row walks the vocabulary three times.

Walk 1: the student's log-normaliser (online) and the teacher's best token. Walk 2: the value, the
overlap and <q, g>. Walk 3: the slope. Only logits are read and only the slope is written, whatever
the loss; the second and the third walk find the row in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_FORWARD_KL = tl.constexpr(0)
_REVERSE_KL = tl.constexpr(1)
_JSD = tl.constexpr(2)
_TV = tl.constexpr(3)
_HARD_CE = tl.constexpr(4)
_LK_ALPHA = tl.constexpr(5)
_LK_LAMBDA = tl.constexpr(6)


@triton.jit
def _slope(p, q, logp, logq, overlap, KIND: tl.constexpr):
    """g of the losses whose gradient is q (g - <q, g>)."""
    sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
    g = 0.5 * sign
    if KIND == _REVERSE_KL:
        g = logq - logp
    if KIND == _JSD:
        high = tl.maximum(logp, logq)
        logm = high + tl.log(tl.exp(logp - high) + tl.exp(logq - high)) - 0.6931471805599453
        g = 0.5 * (logq - logm)
    if KIND == _LK_ALPHA:
        g = -tl.where(q < p, 1.0, 0.0) / overlap
    return g


@triton.jit
def _divergence_kernel(
    student_ptr, teacher_ptr, share_ptr, loss_ptr, grad_ptr, overlap_ptr, vocab,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * vocab
    teacher_ptr += row * vocab
    grad_ptr += row * vocab
    high = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    best = tl.full([], -float("inf"), tl.float32)
    best_index = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < vocab
        z = tl.load(student_ptr + index, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(z, 0))
        total = total * tl.exp(high - higher) + tl.sum(tl.exp(z - higher), 0)
        high = higher
        if KIND == _HARD_CE:
            logp = tl.load(teacher_ptr + index, mask=inside, other=-float("inf")).to(tl.float32)
            top = tl.max(logp, 0)
            first = tl.min(tl.where(logp == top, index, 2147483647), 0)
            best_index = tl.where(top > best, first, best_index)
            best = tl.maximum(top, best)
    lse = high + tl.log(total)

    value = tl.full([], 0.0, tl.float32)
    overlap = tl.full([], 0.0, tl.float32)
    inner = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < vocab
        z = tl.load(student_ptr + index, mask=inside, other=0.0).to(tl.float32)
        logp = tl.load(teacher_ptr + index, mask=inside, other=0.0).to(tl.float32)
        logq = z - lse
        p = tl.where(inside, tl.exp(logp), 0.0)
        q = tl.where(inside, tl.exp(logq), 0.0)
        overlap += tl.sum(tl.minimum(p, q), 0)
        if (KIND == _FORWARD_KL) | (KIND == _LK_LAMBDA):
            value += tl.sum(p * (logp - logq), 0)
        if KIND == _REVERSE_KL:
            value += tl.sum(q * (logq - logp), 0)
        if KIND == _JSD:
            # 1/2 sum p log(p/m) + q log(q/m), by the slopes in both directions
            forward = _slope(q, p, logq, logp, 1.0, KIND)
            value += tl.sum(p * forward + q * _slope(p, q, logp, logq, 1.0, KIND), 0)
        if KIND == _TV:
            value += tl.sum(0.5 * tl.abs(p - q), 0)
        if KIND == _HARD_CE:
            value -= tl.sum(tl.where(index == best_index, logq, 0.0), 0)
        if KIND == _LK_ALPHA:
            inner -= tl.sum(tl.where(q < p, q, 0.0), 0)
        if (KIND != _FORWARD_KL) & (KIND != _HARD_CE) & (KIND != _LK_ALPHA):
            inner += tl.sum(q * _slope(p, q, logp, logq, 1.0, KIND), 0)

    share = tl.full([], 1.0, tl.float32)
    bounded = tl.maximum(overlap, 1e-30)
    if KIND == _LK_ALPHA:
        value = -tl.log(bounded)
        inner = inner / bounded
    if KIND == _LK_LAMBDA:
        share = tl.load(share_ptr + row).to(tl.float32)
        value = share * value + (1.0 - share) * (1.0 - overlap)
    tl.store(loss_ptr + row, value)
    tl.store(overlap_ptr + row, overlap)

    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < vocab
        z = tl.load(student_ptr + index, mask=inside, other=0.0).to(tl.float32)
        logp = tl.load(teacher_ptr + index, mask=inside, other=0.0).to(tl.float32)
        logq = z - lse
        p = tl.exp(logp)
        q = tl.exp(logq)
        if KIND == _FORWARD_KL:
            grad = q - p
        elif KIND == _HARD_CE:
            grad = q - tl.where(index == best_index, 1.0, 0.0)
        else:
            grad = q * (_slope(p, q, logp, logq, bounded, KIND) - inner)
            if KIND == _LK_LAMBDA:
                grad = share * (q - p) + (1.0 - share) * grad
        tl.store(grad_ptr + index, grad, mask=inside)


@torch.library.triton_op("eagle4::divergence", mutates_args={})
def divergence(
    student_RV: torch.Tensor, teacher_logp_RV: torch.Tensor, kind: int, share_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `ops.divergence.divergence`, the kind by its index in ``KINDS``."""
    rows, vocab = student_RV.shape
    student_RV, teacher_logp_RV = student_RV.contiguous(), teacher_logp_RV.contiguous()
    grad_RV = torch.empty(rows, vocab, dtype=torch.float32, device=student_RV.device)
    loss_R, overlap_R = (torch.empty(rows, device=student_RV.device) for _ in range(2))
    share = loss_R if share_R is None else share_R.contiguous()
    sizes: dict[str, Any] = {"KIND": kind, "BLOCK": min(4096, triton.next_power_of_2(vocab))}
    if rows:
        torch.library.wrap_triton(_divergence_kernel)[(rows,)](
            *(student_RV, teacher_logp_RV, share, loss_R, grad_RV, overlap_R, vocab), **sizes
        )
    return loss_R, grad_RV, overlap_R
