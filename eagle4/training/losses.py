"""The loss of all anchors at all depths, without keeping a ``[rows, V]`` tensor.

Rows are scored in chunks that are as large as a budget of logits allows; a chunk's slope turns at
once into ``dL/dh = slope W`` (and ``dL/dW = slope^T h`` where the head is trained), and only those
are kept. Teacher rows are scored once per chunk and shared by all depths. Everything is float32
from the logits on; which divergence is measured is `ops.divergence`'s choice of seven.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..ops import divergence
from .heads import Heads

LOGITS_BUDGET = 1 << 25  # logits of one chunk of anchors at all depths: 128 MB in float32


class DraftLoss(NamedTuple):
    """A scalar to differentiate, and what it was made of."""

    total: torch.Tensor
    loss_BKM: torch.Tensor
    overlap_BKM: torch.Tensor


def depth_weights(num_depths: int, decay: float | tuple[float, ...]) -> torch.Tensor:
    """``decay**k``, or a weight per depth, normalised to sum 1. Raises `ValueError`."""
    if isinstance(decay, (int, float)):
        weight_K = float(decay) ** torch.arange(num_depths, dtype=torch.float32)
    else:
        weight_K = torch.tensor(decay, dtype=torch.float32)
    if len(weight_K) != num_depths or not (weight_K >= 0).all() or not weight_K.sum() > 0:
        raise ValueError(f"{num_depths} depths need as many weights >= 0, not all 0; got {decay}")
    return weight_K / weight_K.sum()


def row_weights(
    valid_BKM: torch.Tensor, weight_K: torch.Tensor, count_K: torch.Tensor | None = None
) -> torch.Tensor:
    """Weight of every row such that the loss is the depth-weighted mean over valid slots.

    ``count_K``: valid slots of the whole optimiser step, where these rows are a part of it.
    """
    count_K = valid_BKM.sum(dim=(0, 2)) if count_K is None else count_K
    weight_K = weight_K.to(valid_BKM.device) / count_K.to(valid_BKM.device).clamp_min(1)
    return valid_BKM * weight_K[:, None]


def draft_loss(
    head_BKMH: torch.Tensor,
    teacher_BJH: torch.Tensor,
    heads: Heads,
    weight_BKM: torch.Tensor,
    kind: str = "forward_kl",
    eta: float = 3.0,
    overlap_K: torch.Tensor | None = None,
    budget: int = LOGITS_BUDGET,
) -> DraftLoss:
    """Weighted loss that differentiates into ``head_BKMH`` and a trained head; loss of every row.

    ``teacher_BJH``: last states, J = M + K - 1; the row of depth k and anchor m is taught by row
    m + k. ``eta``: lk_lambda weighs a depth's KL with ``exp(-eta * mean overlap)``; ``overlap_K``
    are these means, of the step before or of a step like it. Raises `ValueError` without them.
    """
    teacher_CH, student_CH = heads.teacher_CH, heads.student_CH
    if torch.is_autocast_enabled(teacher_CH.device.type):  # once, not in every product
        dtype = torch.get_autocast_dtype(teacher_CH.device.type)
        is_shared = student_CH is teacher_CH
        teacher_CH = teacher_CH.to(dtype)
        student_CH = teacher_CH if is_shared else student_CH.to(dtype)
    rows = max(1, budget // max(1, teacher_CH.shape[0] * head_BKMH.shape[1]))
    share_K = None
    if kind == "lk_lambda":
        if overlap_K is None:
            raise ValueError("lk_lambda needs overlap_K, the mean overlap of every depth")
        share_K = torch.exp(-eta * overlap_K)
    job = (teacher_BJH, teacher_CH, heads.teacher_bias_C, weight_BKM, kind, share_K, rows)
    return DraftLoss(*_DraftLoss.apply(head_BKMH, student_CH, heads.student_bias_C, *job))


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head_BKMH, student_CH, student_bias_C, *job):
        scored = _Scores(head_BKMH, student_CH, student_bias_C, *job)
        scored.run(ctx.needs_input_grad)
        ctx.save_for_backward(*scored.grads)
        ctx.mark_non_differentiable(scored.loss_BKM, scored.overlap_BKM)
        total = (scored.loss_BKM * scored.weight_BKM).sum()
        return total, scored.loss_BKM, scored.overlap_BKM

    @staticmethod
    def backward(ctx, grad_total, *_):
        grads = [None if g is None else g * grad_total for g in ctx.saved_tensors]
        return *grads, *(None,) * 7


class _Scores:
    """One forward pass over all chunks, with the gradients that it leaves."""

    def __init__(
        self, head_BKMH, student_CH, student_bias_C, teacher_BJH, teacher_CH, teacher_bias_C,
        weight_BKM, kind, share_K, rows,
    ):  # fmt: skip
        self.head_BKMH, self.teacher_BJH, self.weight_BKM = head_BKMH, teacher_BJH, weight_BKM
        self.student, self.teacher = (student_CH, student_bias_C), (teacher_CH, teacher_bias_C)
        self.kind, self.share_K, self.rows = kind, share_K, rows
        self.loss_BKM = torch.zeros_like(weight_BKM)
        self.overlap_BKM = torch.zeros_like(weight_BKM)
        self.grads: list[torch.Tensor | None] = [None, None, None]

    def run(self, needs_grad: tuple[bool, ...]) -> None:
        needed = (self.head_BKMH, *self.student)
        self.grads = [
            torch.zeros_like(tensor, dtype=torch.float32) if needs and tensor is not None else None
            for tensor, needs in zip(needed, needs_grad, strict=False)
        ]
        for b, part in self._chunks():
            self._add_gradients(b, part, self._score(b, part))
        dtype = self.head_BKMH.dtype
        self.grads[0] = None if self.grads[0] is None else self.grads[0].to(dtype)

    def _chunks(self) -> Iterator[tuple[int, slice]]:
        """(run, anchors) of every chunk; all depths of the anchors belong to it."""
        batch, _, anchors = self.weight_BKM.shape
        for b in range(batch):
            for first in range(0, anchors, self.rows):
                yield b, slice(first, min(first + self.rows, anchors))

    def _score(self, b: int, part: slice) -> torch.Tensor:
        """Note a chunk's losses and overlaps; returns weighted slopes in place of its products."""
        hidden_KMH = self.head_BKMH[b, :, part]
        depths, anchors = hidden_KMH.shape[:2]
        impl = "triton" if hidden_KMH.is_cuda else "torch"
        taught = self.teacher_BJH[b, part.start : part.stop + depths - 1]
        logp_JC = _logits(_product(taught, self.teacher[0]), self.teacher[1]).log_softmax(-1)
        # one product for all depths: the weights are read (and re-ordered, on a CPU) once
        scored_KMC = _product(hidden_KMH, self.student[0])
        for k, scored_MC in enumerate(scored_KMC):
            share_M = None if self.share_K is None else self.share_K[k].expand(anchors)
            logits_MC = _logits(scored_MC, self.student[1])
            found = divergence(logits_MC, logp_JC[k : k + anchors], self.kind, share_M, impl=impl)
            self.loss_BKM[b, k, part], self.overlap_BKM[b, k, part] = found[0], found[2]
            torch.mul(found.grad_RV, self.weight_BKM[b, k, part, None], out=scored_MC)
        return scored_KMC

    def _add_gradients(self, b: int, part: slice, slope_KMC: torch.Tensor) -> None:
        weight_CH, (grad_head, grad_weight, grad_bias) = self.student[0], self.grads
        if grad_head is not None:
            grad_head[b, :, part] = (slope_KMC @ weight_CH).float()
        if grad_weight is not None:
            hidden_KMH = self.head_BKMH[b, :, part]
            slope_RC, hidden_RH = slope_KMC.flatten(0, 1), hidden_KMH.flatten(0, 1)
            grad_weight.addmm_(slope_RC.T.float(), hidden_RH.float())
        if grad_bias is not None:
            grad_bias += slope_KMC.sum((0, 1), dtype=torch.float32)


def _product(hidden: torch.Tensor, weight_CH: torch.Tensor) -> torch.Tensor:
    return hidden.to(weight_CH.dtype) @ weight_CH.T


def _logits(product: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
    logits = product.float()
    return logits if bias_C is None else logits + bias_C
