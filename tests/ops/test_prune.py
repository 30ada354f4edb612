"""Catches: another choice, order or numbering than the reference's: ties, limits of depth, nodes of
no probability, fewer nodes than slots, chains, stars, 64 nodes.

(The reference itself is judged against EAGLE-2 in `tests/tree/test_grow_prune.py`.)
"""

from __future__ import annotations

import random

import pytest
import torch

from eagle4.ops import prune
from eagle4.types import Tree
from tests.ops.kernels import CHECKS, DEVICE, depths_of, random_parents

STEPS = [0.0, 0.0, -0.25, -0.25, -1.0, float("-inf")]


def pools(seed: int, nodes: int, capacity: int, batch: int = 5) -> Tree:
    """Random pools: parents anywhere before their children, scores with ties."""
    source = random.Random(seed)
    columns = ([], [], [], [])
    for b in range(batch):
        kind = ("chain", "star", "random", "random", "random")[b % 5]
        parents = random_parents(source, nodes, kind)
        scores: list[float] = []
        for parent in parents:
            scores.append((scores[parent] if parent >= 0 else 0.0) + source.choice(STEPS))
        dead = capacity - nodes
        rows = (
            [source.randrange(1, 99) for _ in parents] + [0] * dead,
            parents + [-1] * dead,
            depths_of(parents) + [0] * dead,
            scores + [float("-inf")] * dead,
        )
        for column, row in zip(columns, rows, strict=True):
            column.append(row)
    return Tree(*(torch.tensor(column) for column in columns), torch.full((batch,), nodes))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("nodes", "capacity", "max_nodes"),
    [(1, 1, 1), (3, 8, 2), (20, 20, 16), (12, 40, 16), (64, 64, 64), (180, 180, 63), (9, 9, 99)],
)
def test_the_kernel_selects_the_same_tree(nodes, capacity, max_nodes):
    check(pools(nodes, nodes, capacity), nodes, max_nodes)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_on_random_pools(seed):
    source = random.Random(seed)
    nodes = source.randint(1, 200)
    capacity = nodes + source.randint(0, 60)
    check(pools(seed, nodes, capacity), nodes, source.randint(1, 64))


def check(pool: Tree, nodes: int, max_nodes: int) -> None:
    limit_B = torch.tensor([nodes, 1, 3, 0, 5])
    reference = prune(pool, max_nodes, limit_B, "torch")
    on_device = Tree(*(column.to(DEVICE) for column in pool))
    found = prune(on_device, max_nodes, limit_B.to(DEVICE), "triton")
    for name, before, after in zip(Tree._fields, reference, found, strict=True):
        assert torch.equal(before, after.cpu()), name


def test_sizes_that_no_program_holds_are_refused():
    pool = pools(0, 80, 80, batch=1)
    with pytest.raises(ValueError, match="cannot hold"):
        prune(pool, 70, torch.tensor([9]), "triton")
    assert int(prune(pool, 70, torch.tensor([80])).count_B) > 0


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    pool = [column.to(DEVICE) for column in pools(1, 7, 9)[:4]]
    args = (*pool, torch.full((5,), 4, device=DEVICE), 5)
    torch.library.opcheck(torch.ops.eagle4.prune, args, test_utils=CHECKS)
