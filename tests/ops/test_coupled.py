"""Catches: noise in a kernel that differs from `eagle4.noise` in one bit, a masked token drawn, a
block of the vocabulary that is not looked at, scores that are no law and are served.

(That the choice follows the softmax is proven in `tests/verify/test_coupled.py`.)
"""

from __future__ import annotations

import pytest
import torch

from eagle4.noise import Purpose, position_key, stream_key
from eagle4.ops import coupled_rows
from eagle4.sampling import draw, support
from tests.ops.kernels import CHECKS, DEVICE, generator


def scores(rows: int, vocab: int, scale: float, seed: int) -> torch.Tensor:
    """A third of the tokens is masked, one never is."""
    noise = generator(seed)
    score = scale * torch.randn(rows, vocab, generator=noise)
    score[torch.rand(rows, vocab, generator=noise) < 0.33] = float("-inf")
    score[:, vocab // 2] = 0.0
    return score


def keys(rows: int, seed: int) -> torch.Tensor:
    stream = stream_key(seed, 3)
    return torch.tensor([position_key(stream, Purpose.TOKEN, row) for row in range(rows)])


def test_the_reference_draws_row_by_row():
    score_RV, key_R = scores(5, 40, 1.0, 0), keys(5, 0)
    for found, score_V, key in zip(
        coupled_rows(score_RV, key_R, "torch"), score_RV, key_R.tolist(), strict=True
    ):
        token_S, score_S = support(score_V)
        assert int(found) == int(draw(score_S, token_S, key))
    assert coupled_rows(score_RV[:0], key_R[:0]).shape == (0,)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "vocab", "scale"), [(1, 1, 1.0), (40, 7, 0.3), (5, 3000, 0.0), (2, 5000, 2.0)]
)
def test_the_kernel_draws_the_same_tokens(rows, vocab, scale, dtype):
    score_RV, key_R = scores(rows, vocab, scale, vocab).to(dtype), keys(rows, vocab)
    reference = coupled_rows(score_RV, key_R, "torch")
    found = coupled_rows(score_RV.to(DEVICE), key_R.to(DEVICE), "triton")
    assert torch.equal(found.cpu(), reference)


@pytest.mark.kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_law_gives_no_token(bad):
    score_RV = scores(3, 2500, 1.0, 1)
    score_RV[0, 2400] = bad
    score_RV[1] = float("-inf")
    found = coupled_rows(score_RV.to(DEVICE), keys(3, 1).to(DEVICE), "triton").cpu()
    assert found[:2].tolist() == [-1, -1] and found[2] >= 0
    for row in (0, 1):
        with pytest.raises(RuntimeError, match="probability tensor"):
            coupled_rows(score_RV[row : row + 1], keys(1, 0), "torch")


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    args = (scores(2, 30, 1.0, 0).to(DEVICE), keys(2, 0).to(DEVICE))
    torch.library.opcheck(torch.ops.eagle4.coupled_rows, args, test_utils=CHECKS)
