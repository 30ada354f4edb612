"""Catches: a kernel that accepts another path than the reference: siblings with equal tokens,
unknown choices, padding, trees of one and of 64 nodes, no tree at all.

(The reference itself is judged against a recursive walk in `tests/verify/test_greedy.py`.)
"""

from __future__ import annotations

import random

import pytest
import torch

from eagle4.ops import accept_walk, ancestor_matrix
from eagle4.types import Tree
from tests.ops.kernels import CHECKS, DEVICE, depths_of, random_parents


def trees(seed: int, nodes: int, dead: int, batch: int = 8) -> tuple[Tree, torch.Tensor]:
    """Trees over two or three tokens, so that long accepted paths are common."""
    source = random.Random(seed)
    token, parent, depth, choice = [], [], [], []
    for b in range(batch):
        kind = ("chain", "star", "random", "random")[b % 4]
        parents = random_parents(source, nodes, kind)
        vocab = source.choice([1, 2, 3])
        token.append([source.randrange(vocab) for _ in parents] + [0] * dead)
        parent.append(parents + [-1] * dead)
        depth.append(depths_of(parents) + [0] * dead)
        choice.append(
            [source.randrange(vocab)]
            + [-1 if source.random() < 0.1 else source.randrange(vocab) for _ in parents]
            + [0] * dead
        )
    depth_BN = torch.tensor(depth)
    score_BN = torch.where(depth_BN > 0, -depth_BN.float(), float("-inf"))
    count_B = torch.full((batch,), nodes)
    tree = Tree(torch.tensor(token), torch.tensor(parent), depth_BN, score_BN, count_B)
    return tree, torch.tensor(choice)


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("nodes", "dead"), [(1, 0), (2, 3), (7, 0), (16, 1), (33, 4), (64, 0)])
def test_the_kernel_accepts_the_same_path(seed, nodes, dead):
    tree, choice_BR = trees(seed, nodes, dead)
    matrix = ancestor_matrix(tree.parent_BN, "torch")
    reference = accept_walk(tree, matrix, choice_BR, "torch")
    assert int(reference.length_B.max()) > 0
    on_device = Tree(*(column.to(DEVICE) for column in tree))
    found = accept_walk(on_device, matrix.to(DEVICE), choice_BR.to(DEVICE), "triton")
    for before, after in zip(reference, found, strict=True):
        assert torch.equal(before, after.cpu())


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_without_nodes_the_root_has_its_choice(batch):
    none = torch.zeros(batch, 0, dtype=torch.int64)
    tree = Tree(none, none, none, none.float(), none.sum(dim=1))
    verdict = accept_walk(tree, ancestor_matrix(none), torch.arange(batch).unsqueeze(1))
    assert verdict.path_BS.shape == (batch, 0) and verdict.length_B.tolist() == [0] * batch
    assert verdict.bonus_B.tolist() == list(range(batch))


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    tree, choice_BR = trees(0, 5, 1)
    matrix = ancestor_matrix(tree.parent_BN, "torch")
    args = [tensor.to(DEVICE) for tensor in (*tree[:3], matrix, choice_BR)]
    torch.library.opcheck(torch.ops.eagle4.accept_walk, tuple(args), test_utils=CHECKS)
