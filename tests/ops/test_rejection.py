"""Catches: kernels that accept, refuse or draw otherwise than the reference: the residual after one
or more refusals, a candidate outside the support, children that run out, leaves, candidates that
the warpers removed, q equal to p, scores that are no law.

(That the reference follows the target's law exactly is summed in `tests/engine/test_sampling_law`.)
"""

from __future__ import annotations

import random

import pytest
import torch

from eagle4.noise import Purpose, position_key, stream_key
from eagle4.ops import rejection_rows
from tests.ops.kernels import CHECKS, DEVICE, generator


def state(seed: int, rows: int, vocab: int, count: int, children: int, kind: str = "random"):
    """(scores, two keys, children, candidates, log q) of rows that are like a verified tree's."""
    source, noise = random.Random(seed), generator(seed)
    score = torch.randn(rows, vocab, generator=noise)
    if kind != "same law":
        score[torch.rand(rows, vocab, generator=noise) < 0.3] = float("-inf")
        score[:, 0] = 0.0
    token = torch.stack([torch.randperm(vocab, generator=noise)[:count] for _ in range(rows)])
    logq = torch.randn(rows, count, generator=noise).double().log_softmax(-1)
    if kind == "same law":
        token = torch.arange(vocab).repeat(rows, 1)
        logq = score.double().log_softmax(-1)
    if kind == "warped":
        logq[:, count // 2 :] = float("-inf")
    drawn = torch.full((rows, children), -1)
    for row in range(rows):
        alive = [c for c in range(token.shape[1]) if logq[row, c] > float("-inf")]
        chosen = source.sample(alive, min(source.randint(0, children), len(alive)))
        drawn[row, : len(chosen)] = token[row, chosen]
    if kind == "leaves":  # as `types.Law` holds a row that nothing was drawn behind
        drawn[:], token[:], logq[:] = -1, 0, float("-inf")
    stream = stream_key(seed, 0)
    keys = [
        torch.tensor([position_key(stream, purpose, row) for row in range(rows)])
        for purpose in (Purpose.ACCEPT, Purpose.TOKEN)
    ]
    return score, *keys, drawn, token, logq


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["random", "warped", "same law", "leaves"])
@pytest.mark.parametrize(
    ("rows", "vocab", "count", "children"),
    [(1, 1, 1, 1), (12, 6, 4, 3), (6, 30, 30, 4), (3, 1100, 20, 5), (1, 2049, 4, 1)],
)
def test_the_kernels_choose_the_same_tokens(kind, rows, vocab, count, children):
    if kind == "same law":  # every token is a candidate
        vocab = min(vocab, 30)
    tensors = state(vocab + count, rows, vocab, count, children, kind)
    tokens, refused = rejection_rows(*tensors, impl="torch")
    found = rejection_rows(*(tensor.to(DEVICE) for tensor in tensors), impl="triton")
    assert torch.equal(found[0].cpu(), tokens)
    assert torch.equal(found[1].cpu(), refused)


def test_the_cases_show_every_outcome():
    """Accepted at once, after refusals, and drawn from the residual: all occur above."""
    tensors = state(10, 30, 6, 4, 3)
    tokens, refused = rejection_rows(*tensors, impl="torch")
    tried = (tensors[3] >= 0).sum(dim=1)
    assert (refused == 0).any() and ((refused > 0) & (refused < tried)).any()
    assert ((refused == tried) & (tried > 0)).any() and (tokens >= 0).all()
    assert rejection_rows(*(t[:0] for t in tensors), impl="torch")[0].shape == (0,)


@pytest.mark.kernels
def test_what_is_no_law_gives_no_token():
    tensors = [tensor.to(DEVICE) for tensor in state(1, 4, 40, 8, 2)]
    tensors[0][0, 39], tensors[0][1] = float("nan"), float("-inf")
    tensors[0][2, 0] = float("inf")
    tensors[3][:3] = -1
    assert rejection_rows(*tensors, impl="triton")[0].tolist()[:3] == [-1, -1, -1]


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    args = tuple(tensor.to(DEVICE) for tensor in state(0, 3, 40, 8, 2))
    torch.library.opcheck(torch.ops.eagle4.rejection_rows, args, test_utils=CHECKS)
