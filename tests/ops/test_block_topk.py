"""Catches: a best score that the block pass loses, wrong indices after it, a lost remainder."""

from __future__ import annotations

import pytest
import torch

from eagle4.ops import block_topk


@pytest.mark.parametrize("vocab", [1, 7, 100, 4096, 4099, 49152, 50_257])
@pytest.mark.parametrize("k", [1, 5, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_topk(vocab, k, dtype):
    k = min(k, vocab)
    scores = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab + k)).to(dtype)
    index = block_topk(scores, k)
    assert index.shape == (3, k)
    assert all(len(set(row)) == k for row in index.tolist())
    found = scores.gather(1, index).sort(dim=1, descending=True).values
    assert torch.equal(found, scores.topk(k, dim=1).values)


def test_the_best_may_share_a_block():
    scores = torch.zeros(1, 16 * 1024)
    together = torch.arange(16) * 1024 + 3  # the columns of block 3
    scores[0, together] = torch.arange(1.0, 17.0)
    assert set(block_topk(scores, 16)[0].tolist()) == set(together.tolist())


def test_minus_infinity_and_ties_give_k_distinct_tokens():
    scores = torch.full((2, 8192), float("-inf"))
    scores[:, 5:9] = 1.0
    index = block_topk(scores, 8)
    assert all(set(row) >= {5, 6, 7, 8} and len(set(row)) == 8 for row in index.tolist())


def test_nan_is_not_lost():
    scores = torch.randn(1, 8192)
    scores[0, 77] = float("nan")
    assert 77 in block_topk(scores, 4)[0].tolist()
