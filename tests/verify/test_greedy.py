"""Catches: a branch accepted that is not the target's argmax (A3), a crash on empty, single, chain
or star trees (B4), an accepted path broken by duplicate siblings, padding taken for a node, a
bonus read from the wrong row, rows of a batch that influence each other, a bigger tree that
accepts less (E4).

Every tree of at most six nodes is tried, against a recursive walk.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from eagle4.tree import ancestor_matrix
from eagle4.types import Tree, Verdict
from eagle4.verify import verify_greedy


def all_parents(nodes: int) -> list[tuple[int, ...]]:
    """Every parent list with parents before children."""
    return list(itertools.product(*(range(-1, i) for i in range(nodes))))


def make_tree(parents: list[tuple[int, ...]], tokens: list[list[int]], dead: int = 0) -> Tree:
    """Trees of one size with ``dead`` padding slots behind the nodes."""
    depths = []
    for row in parents:
        depth: list[int] = []
        for parent in row:
            depth.append(1 if parent < 0 else depth[parent] + 1)
        depths.append(depth + [0] * dead)
    batch, nodes = len(parents), len(parents[0])

    def column(rows, fill):
        padded = [list(row) + [fill] * (nodes + dead - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).view(batch, nodes + dead)

    depth_BN = column(depths, 0)
    score_BN = torch.where(depth_BN > 0, -depth_BN.float(), float("-inf"))
    count_B = torch.full((batch,), nodes)
    return Tree(column(tokens, 0), column(parents, -1), depth_BN, score_BN, count_B)


def walk(parents, tokens, choices) -> tuple[list[int], int]:
    """Deepest path of agreeing tokens; at equal depth the one that ends at the first node."""

    def paths(node: int):
        yield []
        for child, parent in enumerate(parents):
            if parent == node and tokens[child] == choices[node + 1] and choices[child + 1] >= 0:
                yield from ([child, *rest] for rest in paths(child))

    best = max(paths(-1), key=lambda path: (len(path), -path[-1] if path else 0))
    return best, choices[best[-1] + 1 if best else 0]


def assert_verdict(verdict: Verdict, b: int, path: list[int], bonus: int) -> None:
    length = int(verdict.length_B[b])
    assert verdict.path_BS[b, :length].tolist() == path
    assert (verdict.path_BS[b, length:] == -1).all()
    assert int(verdict.bonus_B[b]) == bonus


def judge(parents, tokens, choices, dead=0) -> Verdict:
    tree = make_tree(parents, tokens, dead)
    choice = torch.tensor([list(row) + [0] * dead for row in choices])
    return verify_greedy(tree, ancestor_matrix(tree.parent_BN), choice)


@pytest.mark.parametrize("dead", [0, 3])
@pytest.mark.parametrize("nodes", range(7))
def test_every_small_tree_equals_the_walk(nodes, dead):
    source = random.Random(nodes)
    parents = [row for row in all_parents(nodes) for _ in range(4 if nodes > 4 else 12)]
    # Two or three token ids: siblings with equal tokens and long accepted paths are common. Token
    # and choice 0 also fill the padding, which would be accepted if it were taken for a node.
    vocab = [source.choice([1, 2, 2, 3]) for _ in parents]
    tokens = [[source.randrange(v) for _ in range(nodes)] for v in vocab]
    choices = [[source.randrange(v) for _ in range(nodes + 1)] for v in vocab]
    verdict = judge(parents, tokens, choices, dead)
    assert int(verdict.length_B.max()) == nodes
    for b in range(len(parents)):
        assert_verdict(verdict, b, *walk(parents[b], tokens[b], choices[b]))


@pytest.mark.parametrize("nodes", range(1, 6))
def test_nothing_follows_an_unknown_choice(nodes):
    """Rows that were not processed are never accepted, so their choice is never the bonus."""
    source = random.Random(nodes)
    parents = [row for row in all_parents(nodes) for _ in range(6)]
    tokens = [[source.randrange(2) for _ in range(nodes)] for _ in parents]
    choices = [[source.randrange(2)] + [source.choice([-1, 0, 1]) for _ in row] for row in tokens]
    verdict = judge(parents, tokens, choices)
    assert (verdict.bonus_B >= 0).all()
    for b in range(len(parents)):
        assert_verdict(verdict, b, *walk(parents[b], tokens[b], choices[b]))


@pytest.mark.parametrize("order", list(itertools.permutations([5, 6, 7])))
def test_only_the_argmax_among_siblings_is_accepted(order):
    verdict = judge([(-1, -1, -1)], [list(order)], [[6, 1, 2, 3]])
    place = order.index(6)
    assert_verdict(verdict, 0, [place], [1, 2, 3][place])


def test_of_two_equal_siblings_the_one_with_the_right_child_wins():
    # Nodes 0 and 1 carry the argmax; only node 1 has the child that goes on.
    verdict = judge([(-1, -1, 1)], [[5, 5, 6]], [[5, 6, 6, 9]])
    assert_verdict(verdict, 0, [1, 2], 9)
    # Without it, the first of the two.
    assert_verdict(judge([(-1, -1, 1)], [[5, 5, 7]], [[5, 6, 6, 9]]), 0, [0], 6)


def test_rows_of_different_sizes_share_a_batch():
    """A row without nodes beside full ones: its column of padding stays padding."""
    full, empty = make_tree([(-1, 0, 1)], [[0, 0, 0]]), make_tree([()], [[]], dead=3)
    tree = Tree(*(torch.cat(pair) for pair in zip(full, empty, strict=True)))
    choice = torch.zeros(2, 4, dtype=torch.int64)
    verdict = verify_greedy(tree, ancestor_matrix(tree.parent_BN), choice)
    assert_verdict(verdict, 0, [0, 1, 2], 0)
    assert_verdict(verdict, 1, [], 0)


def test_more_nodes_never_accept_less():
    """Nested trees under the same target: the choice depends on the path alone."""
    source = random.Random(0)
    for trial in range(120):
        nodes = source.randint(1, 10)
        parents = tuple(source.randint(-1, i - 1) for i in range(nodes))
        tokens = [source.randrange(2) for _ in range(nodes)]

        def path(node: int, parents=parents, tokens=tokens) -> tuple[int, ...]:
            return () if node < 0 else (*path(parents[node]), tokens[node])

        choices = [random.Random(f"{trial}{path(n)}").randrange(2) for n in range(-1, nodes)]
        lengths = []
        for kept in range(nodes + 1):
            verdict = judge([parents[:kept]], [tokens[:kept]], [choices[: kept + 1]])
            lengths.append(int(verdict.length_B[0]))
        assert lengths == sorted(lengths)
