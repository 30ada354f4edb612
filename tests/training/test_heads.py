"""Can catch: a sampled vocabulary that favours frequent tokens, a reduced vocabulary whose rows are
compared with other tokens' rows, a head that is trained although it is borrowed."""

import pytest
import torch

from eagle4.training.heads import (
    Columns,
    kept_tokens,
    loss_heads,
    sample_columns,
    teacher_is_kept,
)
from tests.training.small import HIDDEN, VOCAB, tiny_drafter, tiny_target


def reduced_drafter(target, kept=(3, 5, 9, 40), **overrides):
    kept = torch.tensor(kept)
    drafter = tiny_drafter(target, draft_vocab_size=len(kept), own_lm_head=True, **overrides)
    drafter.d2t.copy_(kept - torch.arange(len(kept)))
    drafter.t2d[kept] = True
    return drafter


def test_sampled_columns_estimate_the_normaliser():
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(VOCAB, generator=generator)
    estimates = []
    for _ in range(2000):
        columns = sample_columns(torch.tensor([3, 3, 7]), 10, VOCAB, generator)
        assert len(columns.index_C.unique()) == len(columns.index_C) == 12
        assert columns.correction_C[:2].eq(0).all()
        estimates.append((logits_V[columns.index_C] + columns.correction_C).exp().sum())
    assert torch.stack(estimates).mean() == pytest.approx(float(logits_V.exp().sum()), rel=0.01)


def test_a_borrowed_head_is_one_tensor_without_gradient():
    target = tiny_target().requires_grad_(True)
    heads = loss_heads(tiny_drafter(target))
    assert heads.student_CH is heads.teacher_CH and not heads.student_CH.requires_grad
    columns = Columns(torch.tensor([7, 2]), torch.tensor([0.0, 1.5]))
    some = loss_heads(tiny_drafter(target), columns)
    assert torch.equal(some.student_CH, target.lm_head.weight[[7, 2]])
    assert torch.equal(some.student_bias_C, columns.correction_C)


def test_an_own_head_is_trained_and_the_targets_is_not():
    target = tiny_target().requires_grad_(True)
    drafter = tiny_drafter(target, own_lm_head=True)
    heads = loss_heads(drafter, Columns(torch.tensor([7, 2]), torch.zeros(2)))
    assert heads.student_CH.requires_grad and not heads.teacher_CH.requires_grad
    assert torch.equal(heads.student_CH, drafter.lm_head.weight[[7, 2]])
    assert torch.equal(heads.teacher_CH, target.lm_head.weight[[7, 2]])


def test_a_reduced_vocabulary_is_compared_token_by_token():
    target = tiny_target()
    drafter = reduced_drafter(target)
    assert kept_tokens(drafter).tolist() == [3, 5, 9, 40]
    assert kept_tokens(tiny_drafter(target)) is None
    heads = loss_heads(drafter)
    assert heads.student_CH is drafter.lm_head.weight
    assert torch.equal(heads.teacher_CH, target.lm_head.weight[[3, 5, 9, 40]])
    with pytest.raises(ValueError, match="reduced vocabulary"):
        loss_heads(drafter, Columns(torch.tensor([1]), torch.zeros(1)))


def test_rows_whose_teacher_prefers_another_token_are_known():
    target = tiny_target()
    rows = target.lm_head.weight[[3, 4, 40, 41]] * 100
    best = target.lm_head(rows).argmax(-1)
    found = teacher_is_kept(reduced_drafter(target), rows.view(2, 2, HIDDEN))
    wanted = torch.isin(best, torch.tensor([3, 5, 9, 40])).view(2, 2)
    assert torch.equal(found, wanted) and wanted.any() and not wanted.all()
    assert teacher_is_kept(tiny_drafter(target), rows.view(2, 2, HIDDEN)) is None
