"""Which rows of which LM heads a loss compares: all tokens, a sample of them, or a reduced set.

The teacher is always the target: its last states under its own LM head. The student's head is
borrowed from the target (EAGLE-4) or its own (EAGLE-3), over the full vocabulary or over the kept
tokens of ``d2t``, on which the teacher is renormalised.

Sampled vocabulary: the columns are frequent tokens, the batch's own tokens, and a uniform sample of
the rest whose logits get ``log((V - fixed) / sampled)``, so that both log-normalisers are estimated
without favour for the frequent tokens. Student and teacher share columns and correction.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from ..drafter.model import Eagle4Drafter


class Columns(NamedTuple):
    """The part of the vocabulary that a sampled loss looks at."""

    index_C: torch.Tensor  # int64 token ids
    correction_C: torch.Tensor  # float32, added to the logits


class Heads(NamedTuple):
    """Rows of both heads for the same tokens, and what is added to their logits."""

    student_CH: torch.Tensor
    student_bias_C: torch.Tensor | None
    teacher_CH: torch.Tensor
    teacher_bias_C: torch.Tensor | None


def sample_columns(
    fixed: torch.Tensor, num_sampled: int, vocab_size: int, generator: torch.Generator
) -> Columns:
    """``fixed`` tokens (duplicates allowed) and ``num_sampled`` uniform draws from the others."""
    is_fixed = torch.zeros(vocab_size, dtype=torch.bool)
    is_fixed[fixed.cpu()] = True
    inside, outside = is_fixed.nonzero()[:, 0], (~is_fixed).nonzero()[:, 0]
    drawn = outside[torch.randperm(len(outside), generator=generator)[:num_sampled]]
    correction = torch.zeros(len(inside) + len(drawn))
    if len(drawn):
        correction[len(inside) :] = torch.tensor(len(outside) / len(drawn)).log()
    return Columns(torch.cat([inside, drawn]), correction)


def kept_tokens(drafter: Eagle4Drafter) -> torch.Tensor | None:
    """Target ids of a reduced vocabulary in the order of its head's rows; None for all tokens."""
    if drafter.config.draft_vocab_size is None:
        return None
    return torch.arange(len(drafter.d2t), device=drafter.d2t.device) + drafter.d2t


def loss_heads(drafter: Eagle4Drafter, columns: Columns | None = None) -> Heads:
    """The rows that a loss needs; a trainable head keeps its gradient.

    ``columns`` None: every token that the student can propose. Raises `ValueError` for columns with
    a reduced vocabulary, whose rows are few already.
    """
    student_VH, student_bias_V = _parts(drafter.head)
    teacher_VH, teacher_bias_V = _parts(drafter.target_head)
    teacher_VH = teacher_VH.detach()
    teacher_bias_V = None if teacher_bias_V is None else teacher_bias_V.detach()
    if not drafter.config.own_lm_head:
        student_VH, student_bias_V = teacher_VH, teacher_bias_V
    kept = kept_tokens(drafter)
    if kept is not None:
        if columns is not None:
            raise ValueError("a reduced vocabulary is scored whole; pass no columns")
        return Heads(student_VH, student_bias_V, teacher_VH[kept], _rows(teacher_bias_V, kept))
    if columns is None:
        return Heads(student_VH, student_bias_V, teacher_VH, teacher_bias_V)
    index_C = columns.index_C.to(teacher_VH.device)
    correction_C = columns.correction_C.to(teacher_VH.device)
    teacher_CH = teacher_VH[index_C]
    student_CH = teacher_CH if student_VH is teacher_VH else student_VH[index_C]
    biases = (_rows(bias, index_C) for bias in (student_bias_V, teacher_bias_V))
    student_C, teacher_C = (
        correction_C if bias is None else bias + correction_C for bias in biases
    )
    return Heads(student_CH, student_C, teacher_CH, teacher_C)


def teacher_is_kept(drafter: Eagle4Drafter, teacher_BJH: torch.Tensor) -> torch.Tensor | None:
    """``[B, J]``: whether the target's best token is in a reduced vocabulary; None if all are."""
    if drafter.config.draft_vocab_size is None:
        return None
    weight = cast(torch.Tensor, drafter.target_head.weight)
    best = [drafter.target_head(rows.to(weight.dtype)).argmax(-1) for rows in teacher_BJH]
    return drafter.t2d[torch.stack(best)]


def _parts(head: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return head.weight, getattr(head, "bias", None)


def _rows(values: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[index]
