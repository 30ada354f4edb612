"""Catches: a candidate lost between groups, a padded token chosen, a token twice, ties or -inf that
break the count, logits of the wrong row or token, a forgotten bias.

Small integers make every sum exact in float32, so kernels must return exactly the best scores;
with random weights a candidate may only differ where scores are equal within rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle4.ops import best_candidates, candidate_logprobs
from eagle4.ops.candidate_head import exact_logits
from tests.ops.kernels import CHECKS, DEVICE, assert_as_close, generator

SIZES = [(1, 1, 1), (1, 17, 5), (3, 128, 128), (2, 1000, 128), (3, 2051, 64), (17, 300, 7)]


def layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    found = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    found.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        found.bias = nn.Parameter(bias, requires_grad=False)
    return found


def integers(rows: int, vocab: int, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with many ties, all exact."""
    noise = generator(seed)
    low = torch.randint(-2, 3, (rows, rank), generator=noise).float()
    return low, torch.randint(-1, 2, (vocab, rank), generator=noise).float()


def check_best(low: torch.Tensor, up: torch.Tensor, count: int, impl: str) -> None:
    index = best_candidates(low.to(DEVICE), layer(up.to(DEVICE)), count, impl).cpu()
    count = min(count, len(up))
    assert index.shape == (len(low), count) and index.dtype == torch.int64
    assert all(len(set(row)) == count and min(row) >= 0 for row in index.tolist())
    score = low @ up.T
    found = score.gather(1, index).sort(dim=1, descending=True).values
    wanted = score.sort(dim=1, descending=True).values[:, :count]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("rows", "vocab", "count"), SIZES)
def test_the_reference_finds_the_best(rows, vocab, count):
    check_best(*integers(rows, vocab, 8, vocab), count, "torch")


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "vocab", "count"), [*SIZES, (2, 100, 999)])
def test_the_kernels_find_the_best(rows, vocab, count):
    check_best(*integers(rows, vocab, 24, vocab), count, "triton")


@pytest.mark.kernels
def test_all_scores_equal_and_all_but_a_few_minus_infinity():
    low, up = torch.ones(1, 16), torch.zeros(3000, 16)
    check_best(low, up, 40, "triton")
    up[:] = -1
    up[[7, 8, 2999]] = 1
    check_best(low, up, 5, "triton")
    up[:] = 0
    up[:, 0] = float("-inf")
    up[[7, 8, 2999], 0] = 1
    index = best_candidates(low.to(DEVICE), layer(up.to(DEVICE)), 5, "triton").cpu()
    for row in index.tolist():
        assert set(row) >= {7, 8, 2999} and len(set(row)) == 5 and max(row) < 3000


@pytest.mark.kernels
def test_nan_is_the_largest_score():
    low, up = integers(1, 3000, 16, 0)
    up[1234] = float("nan")
    assert 1234 in best_candidates(low.to(DEVICE), layer(up.to(DEVICE)), 4, "triton").tolist()[0]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_scores_within_rounding(dtype):
    noise = generator(1)
    low = torch.randn(2, 128, generator=noise).to(dtype)
    up = torch.randn(2003, 128, generator=noise).to(dtype)
    index = best_candidates(low.to(DEVICE), layer(up.to(DEVICE)), 128, "triton").cpu()
    score = low.double() @ up.double().T
    worst = score.gather(1, index).amin(dim=1)
    assert (worst >= score.topk(128).values[:, -1] - 1e-3).all()
    assert all(len(set(row)) == 128 for row in index.tolist())


def head_inputs(rows: int, count: int, width: int, dtype: torch.dtype):
    noise = generator(rows + count + width)
    weight = torch.randn(300, width, generator=noise).to(dtype) / width**0.5
    bias = torch.randn(300, generator=noise).to(dtype)
    hidden = torch.randn(rows, width, generator=noise).to(dtype)
    return weight, bias, hidden, torch.randint(0, 300, (rows, count), generator=noise)


def test_the_reference_is_the_full_head_at_these_tokens():
    weight, bias, hidden, token = head_inputs(3, 9, 32, torch.float32)
    for own in (None, bias):
        head = layer(weight, own)
        wanted = head(hidden).gather(1, token)
        torch.testing.assert_close(exact_logits(head, hidden, token, "torch"), wanted)
        found = candidate_logprobs(head, hidden, token, "torch")
        torch.testing.assert_close(found, wanted.log_softmax(-1))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "count", "width"), [(1, 1, 5), (3, 128, 64), (2, 13, 1100)])
def test_exact_logits(rows, count, width, dtype):
    weight, bias, hidden, token = head_inputs(rows, count, width, dtype)
    for own in (None, bias):
        exact = (hidden.double().unsqueeze(1) * weight.double()[token]).sum(-1)
        exact = exact if own is None else exact + own.double()[token]
        head = layer(weight.to(DEVICE), None if own is None else own.to(DEVICE))
        found = exact_logits(head, hidden.to(DEVICE), token.to(DEVICE), "triton")
        assert found.dtype == torch.float32 and found.shape == (rows, count)
        # The kernel does not round its float32 sums to the weights' precision.
        reference = exact_logits(layer(weight, own), hidden, token, "torch")
        assert_as_close(found, reference, exact)
        assert float((found.cpu() - exact).abs().max()) < 1e-5


@pytest.mark.kernels
def test_the_operators_are_well_declared():
    low, up = (tensor.to(DEVICE) for tensor in integers(2, 200, 16, 0))
    opcheck = torch.library.opcheck
    opcheck(torch.ops.eagle4.best_candidates, (low, up, 7), test_utils=CHECKS)
    token = torch.tensor([[3, 5], [9, 1]], device=DEVICE)
    for bias in (None, up[:, 0].clone()):
        args = (up, bias, low, token)
        opcheck(torch.ops.eagle4.exact_logits, args, test_utils=CHECKS)
