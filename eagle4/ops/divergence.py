"""How far a student's distribution is from its teacher's, and the slope, for every row.

With p the teacher's probabilities, q = softmax(z) the student's, and overlap = sum_v min(p_v, q_v):

    forward_kl  sum p log(p / q)                     dz = q - p
    reverse_kl  sum q log(q / p)                     dz = q (g - <q, g>),  g = log(q / p)
    jsd         1/2 KL(p | m) + 1/2 KL(q | m)        g = 1/2 log(q / m),   m = (p + q) / 2
    tv          1/2 sum |p - q| = 1 - overlap        g = 1/2 sign(q - p)
    hard_ce     -log q of the teacher's best token   dz = q - onehot
    lk_alpha    -log overlap                         g = -[q < p] / overlap
    lk_lambda   s forward_kl + (1 - s) tv            with the share s of the row given

Overlap is the chance that a drawn token is accepted (Leviathan et al. 2023); the LK losses aim at
it (arXiv 2602.23881). Everything in float32: in bf16 the terms cancel near convergence. The torch
function is the specification; ``impl="triton"`` runs `ops.triton.divergence`, one pass over memory
for the value and one for the slope, without a second ``[R, V]`` tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KINDS = ("forward_kl", "reverse_kl", "jsd", "tv", "hard_ce", "lk_alpha", "lk_lambda")
_LEAST_OVERLAP = 1e-30


class Divergence(NamedTuple):
    """Value, slope and overlap of every row."""

    loss_R: torch.Tensor  # float32, nats (tv: probability)
    grad_RV: torch.Tensor  # float32, d loss / d student logits
    overlap_R: torch.Tensor  # float32, sum of min(p, q)


def divergence(
    student_RV: torch.Tensor,
    teacher_logp_RV: torch.Tensor,
    kind: str = "forward_kl",
    share_R: torch.Tensor | None = None,
    impl: str = "torch",
) -> Divergence:
    """Divergence of ``softmax(student_RV)`` from ``exp(teacher_logp_RV)`` (normalised, finite).

    ``share_R``: weight of the KL in ``lk_lambda``, which needs it. Raises `ValueError` for an
    unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"loss {kind!r} is not known; choose one of {list(KINDS)}")
    if (kind == "lk_lambda") != (share_R is not None):
        raise ValueError("share_R belongs to lk_lambda and to nothing else")
    if impl == "triton":
        from .triton.divergence import divergence as kernel

        return Divergence(*kernel(student_RV, teacher_logp_RV, KINDS.index(kind), share_R))
    logp_RV, p_RV = teacher_logp_RV.float(), teacher_logp_RV.float().exp()
    logq_RV = student_RV.float().log_softmax(dim=-1)
    q_RV = logq_RV.exp()
    overlap_R = torch.minimum(p_RV, q_RV).sum(dim=-1)
    if kind == "forward_kl":
        return Divergence((p_RV * (logp_RV - logq_RV)).sum(-1), q_RV.sub_(p_RV), overlap_R)
    if kind == "hard_ce":
        best_R1 = logp_RV.argmax(dim=-1, keepdim=True)
        loss_R = -logq_RV.gather(1, best_R1)[:, 0]
        return Divergence(loss_R, q_RV.scatter_add(1, best_R1, -torch.ones_like(q_RV)), overlap_R)
    if kind == "lk_lambda":
        assert share_R is not None
        loss_R = share_R * (p_RV * (logp_RV - logq_RV)).sum(-1) + (1 - share_R) * (1 - overlap_R)
        tv_RV = _through_softmax(q_RV, 0.5 * (q_RV - p_RV).sign())
        grad_RV = share_R[:, None] * (q_RV - p_RV) + (1 - share_R[:, None]) * tv_RV
        return Divergence(loss_R, grad_RV, overlap_R)
    loss_R, slope_RV = _soft(kind, p_RV, q_RV, logp_RV, logq_RV, overlap_R)
    return Divergence(loss_R, _through_softmax(q_RV, slope_RV), overlap_R)


def _soft(
    kind: str,
    p_RV: torch.Tensor,
    q_RV: torch.Tensor,
    logp_RV: torch.Tensor,
    logq_RV: torch.Tensor,
    overlap_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and slope with respect to q, up to a constant per row."""
    if kind == "reverse_kl":
        return (q_RV * (logq_RV - logp_RV)).sum(-1), logq_RV - logp_RV
    if kind == "jsd":
        logm_RV = torch.logaddexp(logp_RV, logq_RV) - torch.log(torch.tensor(2.0))
        both_RV = p_RV * (logp_RV - logm_RV) + q_RV * (logq_RV - logm_RV)
        return 0.5 * both_RV.sum(-1), 0.5 * (logq_RV - logm_RV)
    if kind == "tv":
        return 0.5 * (p_RV - q_RV).abs().sum(-1), 0.5 * (q_RV - p_RV).sign()
    assert kind == "lk_alpha", kind
    overlap_R = overlap_R.clamp_min(_LEAST_OVERLAP)
    return -overlap_R.log(), -(q_RV < p_RV).float() / overlap_R[:, None]


def _through_softmax(q_RV: torch.Tensor, slope_RV: torch.Tensor) -> torch.Tensor:
    return q_RV * (slope_RV - (q_RV * slope_RV).sum(-1, keepdim=True))
