"""Catches: a child under the wrong parent, a score above the parent's, a frontier in the wrong
order (ties, -inf, -0), a write outside the level's columns, sequences that leak into each other.

(The reference itself is judged against EAGLE-2 in `tests/tree/test_grow_prune.py`.)
"""

from __future__ import annotations

import pytest
import torch

from eagle4.ops import grow_level
from eagle4.types import Candidates, Tree
from tests.ops.kernels import CHECKS, DEVICE, generator

STEPS = torch.tensor([0.0, -0.0, 1e-7, -0.5, -0.5, -1.0, float("-inf")])


def level(seed: int, batch: int, width: int, per_node: int, drafted: int, capacity: int):
    """A pool with ``drafted`` nodes, a frontier among them and candidates with many ties."""
    noise = generator(seed)
    untouched = torch.arange(batch * capacity).view(batch, capacity)
    score = torch.rand(batch, capacity, generator=noise).mul(4).round().neg()
    count = torch.full((batch,), drafted)
    pool = Tree(untouched + 7, untouched % 5 - 1, untouched % 3, score, count)
    frontier = torch.stack([torch.randperm(drafted, generator=noise)[:width] for _ in range(batch)])
    shape = (batch * width, per_node)
    logp = STEPS[torch.randint(0, len(STEPS), shape, generator=noise)]
    return pool, frontier, Candidates(torch.randint(0, 999, shape, generator=noise), logp)


def grown(impl: str, device, pool, frontier, candidates, top_k: int):
    pool = Tree(*(column.clone().to(device) for column in pool))
    candidates = Candidates(*(part.to(device) for part in candidates))
    order = grow_level(pool, frontier.to(device), candidates, top_k, impl)
    return [part.cpu() for part in (*pool, order)]


def test_the_reference_by_hand():
    inf = float("inf")
    columns = torch.tensor([[0, 4, 0, 0, 0, 0]])
    score = torch.tensor([[-1.0, -2.0, -inf, -inf, -inf, -inf]])
    pool = Tree(columns * 0, columns * 0 - 1, columns, score, torch.tensor([2]))
    candidates = Candidates(
        torch.tensor([[11, 12], [13, 14]]), torch.tensor([[-3.0, 0.1], [-0.5, -2.0]])
    )
    frontier = torch.tensor([[1, 0]])
    token, parent, depth, score, count, order = grown("torch", "cpu", pool, frontier, candidates, 3)
    assert token[0].tolist() == [0, 0, 11, 12, 13, 14]
    assert parent[0].tolist() == [-1, -1, 1, 1, 0, 0] and depth[0].tolist() == [0, 4, 5, 5, 1, 1]
    assert score[0].tolist() == [-1, -2, -5, -2, -1.5, -3] and count.tolist() == [2]
    assert order.tolist() == [[2, 1, 3]]


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("batch", "width", "per_node", "top_k"),
    [(1, 1, 1, 1), (2, 4, 4, 4), (3, 3, 5, 3), (1, 8, 8, 8), (2, 2, 3, 99)],
)
def test_the_kernel_grows_the_same_level(seed, batch, width, per_node, top_k):
    drafted = width + seed
    state = level(seed, batch, width, per_node, drafted, drafted + width * per_node + seed % 2)
    reference = grown("torch", "cpu", *state, top_k)
    for before, after in zip(reference, grown("triton", DEVICE, *state, top_k), strict=True):
        assert torch.equal(before, after)


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    pool, frontier, candidates = level(0, 2, 2, 3, 4, 12)
    children = (part.view(2, -1) for part in candidates)
    args = [tensor.to(DEVICE) for tensor in (*pool, frontier, *children)]
    torch.library.opcheck(torch.ops.eagle4.grow_level, (*args, 2), test_utils=CHECKS)
