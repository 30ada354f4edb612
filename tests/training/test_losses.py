"""Can catch: a wrong gradient of any loss into states, head or bias, a teacher row given to the
wrong depth, chunks that change the result, weights that depend on padding or micro-batches."""

import pytest
import torch

from eagle4.ops.divergence import KINDS
from eagle4.training.heads import Heads
from eagle4.training.losses import depth_weights, draft_loss, row_weights

B, K, M, H, V = 2, 3, 5, 16, 50


def case(seed=0, bias=False, scale=1.0, own=False):
    """Head inputs, teacher states, heads and row weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * scale

    teacher_VH = draw(V, H) / 4
    bias_V = draw(V) if bias else None
    student_VH = draw(V, H) / 4 if own else teacher_VH
    heads = Heads(student_VH, bias_V, teacher_VH, bias_V)
    valid_BKM = torch.rand(B, K, M, generator=generator) > 0.3
    weight_BKM = row_weights(valid_BKM, depth_weights(K, 0.8))
    return draw(B, K, M, H), draw(B, M + K - 1, H), heads, weight_BKM


def reference(head_BKMH, teacher_BJH, heads, weight_BKM, kind, eta=3.0):
    """The definition in float64 through autograd.

    (mean overlap of every depth, total, slopes of states, head and bias)
    """
    hidden = head_BKMH.detach().double().requires_grad_()
    student = heads.student_CH.detach().double().requires_grad_()
    zeros = torch.zeros(len(student), dtype=torch.float64)
    bias = (zeros if heads.student_bias_C is None else heads.student_bias_C.detach()).double()
    bias.requires_grad_()
    teacher_bias = zeros if heads.teacher_bias_C is None else heads.teacher_bias_C.double()
    total, overlaps = torch.zeros((), dtype=torch.float64), []
    for k in range(K):
        teacher = teacher_BJH[:, k : k + M].double() @ heads.teacher_CH.detach().double().T
        logp = (teacher + teacher_bias).log_softmax(-1)
        logq = (hidden[:, k] @ student.T + bias).log_softmax(-1)
        p, q = logp.exp(), logq.exp()
        overlap, m = torch.minimum(p, q).sum(-1), (p + q) / 2
        kl, weight = (p * (logp - logq)).sum(-1), weight_BKM[:, k]
        rows = weight > 0
        overlaps.append(overlap[rows].mean().detach())
        share = torch.exp(-eta * overlaps[-1])
        loss = {
            "forward_kl": kl,
            "reverse_kl": (q * (logq - logp)).sum(-1),
            "jsd": 0.5 * (p * (logp - m.log()) + q * (logq - m.log())).sum(-1),
            "tv": 1 - overlap,
            "hard_ce": -logq.gather(-1, logp.argmax(-1, keepdim=True))[..., 0],
            "lk_alpha": -overlap.log(),
            "lk_lambda": share * kl + (1 - share) * (1 - overlap),
        }[kind]
        total = total + (weight * loss).sum()
    total.backward()
    return torch.stack(overlaps).float(), total.detach(), hidden.grad, student.grad, bias.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1 << 20, 2 * V, 1])
def test_value_and_gradients_match_float64(kind, budget):
    head_BKMH, teacher_BJH, heads, weight_BKM = case(bias=True, own=True)
    hidden = head_BKMH.clone().requires_grad_()
    own, bias = heads.student_CH.requires_grad_(), heads.student_bias_C.clone().requires_grad_()
    scored = heads._replace(student_CH=own, student_bias_C=bias)
    overlap_K, total, *slopes = reference(head_BKMH, teacher_BJH, heads, weight_BKM, kind)
    given = {"overlap_K": overlap_K, "budget": budget}
    found = draft_loss(hidden, teacher_BJH, scored, weight_BKM, kind, **given)
    (2 * found.total).backward()
    torch.testing.assert_close(found.total.double(), total, rtol=1e-5, atol=1e-6)
    for tensor, slope in zip((hidden, own, bias), slopes, strict=True):
        torch.testing.assert_close(tensor.grad.double(), 2 * slope, rtol=1e-3, atol=2e-5)
    assert found.overlap_BKM.min() >= 0 and found.overlap_BKM.max() <= 1 + 1e-6


@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_a_borrowed_head_gets_no_gradient(scale):
    head_BKMH, teacher_BJH, heads, weight_BKM = case(scale=scale)
    hidden = head_BKMH.clone().requires_grad_()
    draft_loss(hidden, teacher_BJH, heads, weight_BKM).total.backward()
    wanted = reference(head_BKMH, teacher_BJH, heads, weight_BKM, "forward_kl")[2]
    torch.testing.assert_close(hidden.grad.double(), wanted, rtol=1e-3, atol=1e-5)
    assert heads.teacher_CH.grad is None


def test_lk_lambda_needs_the_overlap_that_it_weighs_with():
    head_BKMH, teacher_BJH, heads, weight_BKM = case()
    with pytest.raises(ValueError, match="overlap_K"):
        draft_loss(head_BKMH, teacher_BJH, heads, weight_BKM, "lk_lambda")


def test_depth_weights_sum_to_one_and_decay():
    weight_K = depth_weights(5, 0.8)
    assert weight_K.sum() == pytest.approx(1.0)
    assert torch.allclose(weight_K[1:] / weight_K[:-1], torch.tensor(0.8))
    assert depth_weights(3, (2.0, 1.0, 1.0)).tolist() == [0.5, 0.25, 0.25]
    for wrong in ((1.0, 1.0), (0.0, 0.0, 0.0), (1.0, -1.0, 1.0)):
        with pytest.raises(ValueError, match="3 depths"):
            depth_weights(3, wrong)


def test_loss_is_a_mean_over_valid_slots():
    valid_BKM = torch.zeros(2, 2, 3, dtype=torch.bool)
    valid_BKM[0, 0, :2] = valid_BKM[1, 1, 0] = True
    weight_K = torch.tensor([0.75, 0.25])
    weight_BKM = row_weights(valid_BKM, weight_K)
    assert weight_BKM[0, 0].tolist() == [0.375, 0.375, 0.0]
    assert weight_BKM[1, 1].tolist() == [0.25, 0.0, 0.0]
    assert float(weight_BKM.sum()) == 1.0
    halves = [row_weights(half, weight_K, valid_BKM.sum((0, 2))) for half in valid_BKM[:, None]]
    assert torch.equal(torch.cat(halves), weight_BKM)
