"""Can catch: a wrong gradient, a teacher row given to the wrong depth, low-precision cancellation,
weights that depend on padding, a sampled vocabulary that favours frequent tokens."""

import pytest
import torch

from eagle4.training.losses import (
    Columns,
    depth_weights,
    row_weights,
    sample_columns,
    soft_cross_entropy,
)

B, K, M, H, V = 2, 3, 5, 16, 50


def case(seed=0, bias=False, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    head = torch.nn.Linear(H, V, bias=bias)
    head_BKMH = torch.randn(B, K, M, H, generator=generator) * scale
    teacher_BJH = torch.randn(B, M + K - 1, H, generator=generator) * scale
    valid_BKM = torch.rand(B, K, M, generator=generator) > 0.3
    return head, head_BKMH, teacher_BJH, row_weights(valid_BKM, depth_weights(K, 0.8))


def reference(head, head_BKMH, teacher_BJH, weight_BKM, columns=None):
    """The definition in float64 through autograd."""
    weight = head.weight.detach().double()
    bias = torch.zeros(V).double() if head.bias is None else head.bias.detach().double()
    if columns is not None:
        weight, bias = weight[columns.index_C], bias[columns.index_C] + columns.correction_C
    hidden = head_BKMH.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for k in range(K):
        p = (teacher_BJH[:, k : k + M].double() @ weight.T + bias).softmax(-1)
        logq = (hidden[:, k] @ weight.T + bias).log_softmax(-1)
        total = total - (weight_BKM[:, k] * (p * logq).sum(-1)).sum()
    total.backward()
    return total.detach(), hidden.grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_value_and_gradient_match_float64(bias, scale, sampled):
    head, head_BKMH, teacher_BJH, weight_BKM = case(bias=bias, scale=scale)
    columns = None
    if sampled:
        columns = sample_columns(torch.arange(10), 20, V, torch.Generator().manual_seed(0))
    hidden = head_BKMH.clone().requires_grad_()
    total, _ = soft_cross_entropy(hidden, teacher_BJH, head, weight_BKM, columns)
    (2 * total).backward()
    wanted, grad = reference(head, head_BKMH, teacher_BJH, weight_BKM, columns)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), 2 * grad, rtol=1e-4, atol=1e-6)
    assert head.weight.grad is None


def test_depth_weights_sum_to_one_and_decay():
    weight_K = depth_weights(5, 0.8)
    assert weight_K.sum() == pytest.approx(1.0)
    assert torch.allclose(weight_K[1:] / weight_K[:-1], torch.tensor(0.8))


def test_loss_is_a_mean_over_valid_slots():
    valid_BKM = torch.zeros(2, 2, 3, dtype=torch.bool)
    valid_BKM[0, 0, :2] = valid_BKM[1, 1, 0] = True
    weight_BKM = row_weights(valid_BKM, torch.tensor([0.75, 0.25]))
    assert weight_BKM[0, 0].tolist() == [0.375, 0.375, 0.0]
    assert weight_BKM[1, 1].tolist() == [0.25, 0.0, 0.0]
    assert float(weight_BKM.sum()) == 1.0


def test_sampled_columns_estimate_the_normaliser():
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(V, generator=generator)
    estimates = []
    for _ in range(2000):
        columns = sample_columns(torch.tensor([3, 3, 7]), 10, V, generator)
        assert len(columns.index_C.unique()) == len(columns.index_C) == 12
        assert columns.correction_C[:2].eq(0).all()
        estimates.append((logits_V[columns.index_C] + columns.correction_C).exp().sum())
    assert torch.stack(estimates).mean() == pytest.approx(float(logits_V.exp().sum()), rel=0.01)


def test_all_columns_are_the_full_loss():
    head, head_BKMH, teacher_BJH, weight_BKM = case()
    every = Columns(torch.randperm(V), torch.zeros(V))
    full = soft_cross_entropy(head_BKMH, teacher_BJH, head, weight_BKM)
    some = soft_cross_entropy(head_BKMH, teacher_BJH, head, weight_BKM, every)
    torch.testing.assert_close(full[0], some[0])
    torch.testing.assert_close(full[1], some[1])
