"""Catches: an ancestor missing on long paths, a sibling taken for one, the 64th node's sign bit.

(The reference itself is judged node by node in `tests/tree/test_grow_prune.py`.)
"""

from __future__ import annotations

import random

import pytest
import torch

from eagle4.ops import ancestor_matrix, ancestor_words, pack_bits, unpack_bits
from tests.ops.kernels import CHECKS, DEVICE, random_parents

NODES = [1, 2, 5, 16, 33, 63, 64]


def parents_of(nodes: int) -> torch.Tensor:
    source = random.Random(nodes)
    rows = [random_parents(source, nodes) for _ in range(6)]
    rows += [random_parents(source, nodes, kind) for kind in ("chain", "star")]
    return torch.tensor(rows)


@pytest.mark.parametrize("nodes", NODES)
def test_words_are_the_rows_of_the_matrix(nodes):
    parent_BN = parents_of(nodes)
    word_BN = ancestor_words(parent_BN, "torch")
    matrix_BNN = ancestor_matrix(parent_BN, "torch")
    for row, words in zip(matrix_BNN.tolist(), word_BN.tolist(), strict=True):
        for seen, word in zip(row, words, strict=True):
            assert word % (1 << 64) == sum(1 << j for j, bit in enumerate(seen) if bit)


def test_trees_that_do_not_fit():
    with pytest.raises(ValueError, match="65 nodes"):
        ancestor_words(torch.full((1, 65), -1))
    with pytest.raises(ValueError, match="cannot hold"):
        ancestor_matrix(torch.full((1, 65), -1), "triton")
    assert ancestor_words(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
    assert ancestor_matrix(torch.full((1, 65), -1)).sum() == 65


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_bits_come_back(width):
    member = torch.rand(3, 2, width, generator=torch.Generator().manual_seed(width)) < 0.5
    words = pack_bits(member)
    assert words.shape == (3, 2, -(-width // 64)) and words.dtype == torch.int64
    assert torch.equal(unpack_bits(words, width), member)
    assert (pack_bits(torch.ones_like(member))[..., : width // 64] == -1).all()


@pytest.mark.kernels
@pytest.mark.parametrize("nodes", NODES)
def test_the_kernel_finds_the_same_sets(nodes):
    parent_BN = parents_of(nodes)
    found = ancestor_words(parent_BN.to(DEVICE), "triton").cpu()
    assert torch.equal(found, ancestor_words(parent_BN, "torch"))
    matrix = ancestor_matrix(parent_BN.to(DEVICE), "triton").cpu()
    assert torch.equal(matrix, ancestor_matrix(parent_BN, "torch"))


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    args = (parents_of(5).to(DEVICE),)
    torch.library.opcheck(torch.ops.eagle4.ancestor_words, args, test_utils=CHECKS)
