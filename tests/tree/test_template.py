"""Catches: a shape with a child before its parent, a younger sibling without its elder, or in an
order other than the draws'; slots dropped while their descendants or their laws stay; a shape that
is not the best one.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from eagle4.tree import best_template, keep_slots
from eagle4.types import Drawn, Law, Tree


def survival(template, slot: int, table) -> float:
    value = 1.0
    while slot >= 0:
        value *= table[template.depth[slot] - 1][template.rank[slot]]
        slot = template.parent[slot]
    return value


def random_table(source: random.Random, depth: int, width: int) -> list[list[float]]:
    rows = [sorted((source.random() for _ in range(width)), reverse=True) for _ in range(depth)]
    return [[value / sum(row) * 0.9 for value in row] for row in rows]


@pytest.mark.parametrize("seed", range(8))
def test_shape(seed):
    source = random.Random(seed)
    table = random_table(source, source.randint(1, 6), source.randint(1, 4))
    most = source.randint(1, 20)
    template = best_template(table, most, len(table[0]), 0.01)
    assert 1 <= len(template.parent) <= most
    for slot, (parent, rank, depth) in enumerate(zip(*template, strict=True)):
        assert parent < slot and depth == 1 + (template.depth[parent] if parent >= 0 else 0)
        elder = [s for s in range(slot) if template.parent[s] == parent]
        assert rank == len(elder), "elder siblings come first, without a gap"
        assert slot == 0 or survival(template, slot, table) >= 0.01
        # Depth first: the parent is on the path that ends at the slot before.
        path, last = {-1}, slot - 1
        while last >= 0:
            path.add(last)
            last = template.parent[last]
        assert parent in path


def test_it_is_the_best_one():
    table = [[0.5, 0.2, 0.1], [0.4, 0.25, 0.1], [0.3, 0.2, 0.15]]
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]

    def value(path):
        result = 1.0
        for depth, rank in enumerate(path):
            result *= table[depth][rank]
        return result

    best = sorted((value(path) for path in every), reverse=True)
    for most in (1, 3, 7, 12):
        template = best_template(table, most, 3, 0.0)
        found = sum(survival(template, slot, table) for slot in range(most))
        assert found == pytest.approx(sum(best[:most]))


def test_width_one_is_a_chain_and_hopeless_slots_are_left_out():
    chain = best_template([[0.5]] * 10, 8, 1, 0.1)
    assert chain.parent == (-1, 0, 1) and chain.rank == (0, 0, 0)
    assert best_template([[0.001]] * 3, 8, 1, 0.1).parent == (-1,)


def test_dropping_slots_renumbers_parents_and_laws():
    parent = torch.tensor([[-1, 0, 1, 0, -1, 4]] * 2)
    tokens = torch.arange(6).repeat(2, 1) + 10
    law = torch.arange(7).view(1, 7, 1).repeat(2, 1, 1)
    depth = torch.tensor([[1, 2, 3, 2, 1, 2]] * 2)
    count = torch.tensor([6, 6])
    drawn = Drawn(Tree(tokens, parent, depth, -depth.float(), count), Law(law, law.double()))
    kept = torch.tensor([[True] * 6, [True, False, False, True, True, False]])
    found, found_law = keep_slots(drawn, kept)
    assert found.count_B.tolist() == [6, 3]
    assert found.token_BN[0].tolist() == tokens[0].tolist()
    assert found.parent_BN[0].tolist() == parent[0].tolist()
    assert found.token_BN[1].tolist() == [10, 13, 14, 0, 0, 0]
    assert found.parent_BN[1].tolist() == [-1, 0, -1, -1, -1, -1]
    assert found.depth_BN[1].tolist() == [1, 2, 1, 0, 0, 0]
    assert found_law.token_BRC[1, :4, 0].tolist() == [0, 1, 4, 5]
