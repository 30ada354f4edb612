"""Forward KL to the target's distribution without keeping a ``[rows, V]`` tensor.

Per anchor and depth, with student logits z and teacher probabilities p:
``L = logsumexp(z) - sum_v p_v z_v`` (the teacher's entropy, a constant, is left out), in float32.
``dL/dz = softmax(z) - p``, so the forward pass makes ``dL/dh = (softmax(z) - p) W`` at once and
keeps only that. The head is frozen. Teacher rows are scored once per run and shared by all depths.

Sampled vocabulary: the columns are frequent tokens, the batch's own tokens, and a uniform sample of
the rest whose logits get ``log((V - fixed) / sampled)``, so that both log-normalisers are estimated
without favour for the frequent tokens. Student and teacher share columns and correction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Columns(NamedTuple):
    """The part of the vocabulary that a sampled loss looks at."""

    index_C: torch.Tensor  # int64 token ids
    correction_C: torch.Tensor  # float32, added to the logits


def sample_columns(
    fixed: torch.Tensor, num_sampled: int, vocab_size: int, generator: torch.Generator
) -> Columns:
    """``fixed`` tokens (duplicates allowed) and ``num_sampled`` uniform draws from the others."""
    is_fixed = torch.zeros(vocab_size, dtype=torch.bool)
    is_fixed[fixed] = True
    inside, outside = is_fixed.nonzero()[:, 0], (~is_fixed).nonzero()[:, 0]
    drawn = outside[torch.randperm(len(outside), generator=generator)[:num_sampled]]
    correction = torch.zeros(len(inside) + len(drawn))
    if len(drawn):
        correction[len(inside) :] = torch.tensor(len(outside) / len(drawn)).log()
    return Columns(torch.cat([inside, drawn]), correction)


def depth_weights(num_depths: int, decay: float) -> torch.Tensor:
    """``decay**k``, normalised to sum 1."""
    weight_K = decay ** torch.arange(num_depths, dtype=torch.float32)
    return weight_K / weight_K.sum()


def row_weights(valid_BKM: torch.Tensor, weight_K: torch.Tensor) -> torch.Tensor:
    """Weight of every row such that the loss is the depth-weighted mean over valid slots."""
    count_K = valid_BKM.sum(dim=(0, 2)).clamp_min(1)
    return valid_BKM * (weight_K.to(valid_BKM.device) / count_K)[:, None]


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head_BKMH, teacher_BJH, weight_CH, bias_C, row_weight_BKM):
        loss_BKM = torch.empty_like(row_weight_BKM)
        grad_BKMH = torch.empty_like(head_BKMH)
        for b in range(head_BKMH.shape[0]):
            loss_BKM[b], grad_BKMH[b] = _one_run(
                head_BKMH[b], teacher_BJH[b], weight_CH, bias_C, row_weight_BKM[b]
            )
        ctx.save_for_backward(grad_BKMH)
        ctx.mark_non_differentiable(loss_BKM)
        return (loss_BKM * row_weight_BKM).sum(), loss_BKM

    @staticmethod
    def backward(ctx, grad_total, _):
        (grad_BKMH,) = ctx.saved_tensors
        return grad_BKMH * grad_total, None, None, None, None


def _logits(hidden: torch.Tensor, weight_CH: torch.Tensor, bias_C: torch.Tensor | None):
    logits = (hidden.to(weight_CH.dtype) @ weight_CH.T).float()
    return logits if bias_C is None else logits.add_(bias_C)


def _one_run(head_KMH, teacher_JH, weight_CH, bias_C, row_weight_KM):
    teacher_JC = torch.softmax(_logits(teacher_JH, weight_CH, bias_C), dim=-1)
    loss_KM, grad_KMH = torch.empty_like(row_weight_KM), torch.empty_like(head_KMH)
    num_anchors = head_KMH.shape[1]
    for k in range(head_KMH.shape[0]):
        logits_MC = _logits(head_KMH[k], weight_CH, bias_C)
        teacher_MC = teacher_JC[k : k + num_anchors]
        lse_M = torch.logsumexp(logits_MC, dim=-1)
        loss_KM[k] = lse_M - (teacher_MC * logits_MC).sum(-1)
        delta_MC = logits_MC.sub_(lse_M[:, None]).exp_().sub_(teacher_MC)
        delta_MC.mul_(row_weight_KM[k][:, None])
        grad_KMH[k] = delta_MC.to(weight_CH.dtype) @ weight_CH
    return loss_KM, grad_KMH


def soft_cross_entropy(
    head_BKMH: torch.Tensor,
    teacher_BJH: torch.Tensor,
    lm_head: Any,
    row_weight_BKM: torch.Tensor,
    columns: Columns | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss (a scalar that differentiates into ``head_BKMH``) and loss of every row.

    ``teacher_BJH``: last states, J = M + K - 1; the row of depth k and anchor m is taught by row
    m + k. ``columns`` None: the full vocabulary. Everything in float32 from the logits on.
    """
    weight_CH, bias_C = lm_head.weight.detach(), getattr(lm_head, "bias", None)
    if columns is not None:
        weight_CH = weight_CH[columns.index_C]
        correction_C = columns.correction_C.to(weight_CH.device)
        bias_C = correction_C if bias_C is None else bias_C[columns.index_C] + correction_C
    if torch.is_autocast_enabled(weight_CH.device.type):  # once, not in every product
        weight_CH = weight_CH.to(torch.get_autocast_dtype(weight_CH.device.type))
    return _SoftCrossEntropy.apply(head_BKMH, teacher_BJH, weight_CH, bias_C, row_weight_BKM)
