"""Catches: a node selected without its parent, a better node left out, ties that break a path
apart, children attributed to the wrong parent, a tree that is not depth first with the best child
first, drafting stopped early (or not at all) by a wrong saturation rule, depth limits of one
sequence that leak into another, padding slots that look like nodes.

The reference is EAGLE-2 written as plain Python over lists.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from eagle4.tree import Growth, ancestor_matrix, extend, is_saturated, prune, start
from eagle4.types import Candidates, Tree

INF = float("inf")
STEPS = [0.0, 0.0, -0.5, -0.5, -1.0, -2.0, -INF]  # ties, certain edges, impossible edges


class Node(NamedTuple):
    path: tuple[int, ...]  # tokens from depth 1 down: names the node
    score: float


class Law:
    """Children of every path: distinct tokens and log-probabilities, best first."""

    def __init__(self, seed: int, top_k: int, steps: list[float] | None = None):
        self.seed, self.top_k, self.steps = seed, top_k, steps

    def __call__(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        source = random.Random(f"{self.seed}{path}")
        tokens = source.sample(range(1, 90), self.top_k)
        draw = (
            (lambda: source.choice(self.steps)) if self.steps else (lambda: source.uniform(-2, 0))
        )
        return list(zip(tokens, sorted((draw() for _ in tokens), reverse=True), strict=True))

    def candidates(self, paths: list[tuple[int, ...]]) -> Candidates:
        rows = [self(path) for path in paths]
        return Candidates(
            torch.tensor([[token for token, _ in row] for row in rows]),
            torch.tensor([[logp for _, logp in row] for row in rows]),
        )


def grow(laws: list[Law], levels: int, max_depth: int):
    """The implementation, level by level; yields a copy of the growth after every level."""
    top_k = laws[0].top_k
    roots = [law.candidates([()]) for law in laws]
    growth = start(
        Candidates(*(torch.cat(parts) for parts in zip(*roots, strict=True))), max_depth, top_k
    )
    yield kept(growth)
    for _ in range(levels - 1):
        rows = [
            law.candidates([path_of(growth.pool, b, int(i)) for i in growth.frontier_BK[b]])
            for b, law in enumerate(laws)
        ]
        joined = Candidates(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
        growth = extend(growth, joined, top_k)
        yield kept(growth)


def kept(growth: Growth) -> Growth:
    """A copy: `extend` writes into the pool that it is given."""
    return growth._replace(pool=Tree(*(column.clone() for column in growth.pool)))


def path_of(tree: Tree, b: int, node: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node >= 0:
        path = (int(tree.token_BN[b, node]), *path)
        node = int(tree.parent_BN[b, node])
    return path


def reference_pool(law: Law, levels: int) -> list[Node]:
    """EAGLE-2: every level expands the best ``top_k`` of the level before."""
    frontier, pool = [Node((), 0.0)], []
    for _ in range(levels):
        children = [
            Node((*node.path, token), float(np.float32(node.score) + np.float32(logp)))
            for node in frontier
            for token, logp in law(node.path)
        ]
        pool += children
        frontier = sorted(children, key=lambda node: -node.score)[: law.top_k]
    return pool


def reference_tree(pool: list[Node], max_nodes: int, limit: int) -> list[Node]:
    """The best nodes, depth first, best child first."""
    allowed = [node for node in pool if len(node.path) <= limit and node.score > -INF]
    kept = sorted(allowed, key=lambda node: -node.score)[:max_nodes]
    ordered: list[Node] = []

    def visit(path: tuple[int, ...]) -> None:
        for node in kept:
            if node.path[:-1] == path:
                ordered.append(node)
                visit(node.path)

    visit(())
    assert len(ordered) == len(kept), "the reference itself must be closed under ancestors"
    return ordered


def nodes_of(tree: Tree, b: int) -> list[Node]:
    count = int(tree.count_B[b])
    return [Node(path_of(tree, b, i), float(tree.score_BN[b, i])) for i in range(count)]


def assert_well_formed(tree: Tree) -> None:
    batch, nodes = tree.token_BN.shape
    index = torch.arange(nodes)
    for b in range(batch):
        count = int(tree.count_B[b])
        parent, depth, score = tree.parent_BN[b], tree.depth_BN[b], tree.score_BN[b]
        assert (parent < index).all() and (parent >= -1).all()
        for i in range(count):
            up = int(parent[i])
            assert int(depth[i]) == (1 if up < 0 else int(depth[up]) + 1)
            assert up < 0 or (up < count and score[i] <= score[up])
        assert (tree.token_BN[b, count:] == 0).all() and (parent[count:] == -1).all()
        assert (depth[count:] == 0).all() and (score[count:] == -INF).all()


CASES = [
    (seed, top_k, levels, max_nodes, steps)
    for seed, (top_k, levels, max_nodes) in enumerate(
        [(1, 1, 1), (1, 5, 3), (1, 6, 16), (2, 4, 5), (3, 4, 9), (4, 4, 16), (4, 2, 63), (4, 6, 7)]
    )
    for steps in (None, STEPS, [0.0], [-1.0, -INF])
]


@pytest.mark.parametrize(("seed", "top_k", "levels", "max_nodes", "steps"), CASES)
def test_equals_the_reference_for_every_depth_limit(seed, top_k, levels, max_nodes, steps):
    laws = [Law(10 * seed + b, top_k, steps) for b in range(levels + 2)]
    growth = list(grow(laws, levels, levels + 1))[-1]
    limits = list(range(levels + 1)) + [levels]  # 0: nothing allowed
    tree = prune(growth.pool, max_nodes, torch.tensor(limits))
    assert_well_formed(tree)
    for b, law in enumerate(laws):
        wanted = reference_tree(reference_pool(law, levels), max_nodes, limits[b])
        assert nodes_of(tree, b) == wanted


@pytest.mark.parametrize("steps", [None, STEPS, [0.0, -0.5]])
@pytest.mark.parametrize(("top_k", "max_nodes"), [(1, 2), (2, 4), (3, 6), (4, 10)])
def test_once_saturated_another_level_changes_nothing(top_k, max_nodes, steps):
    levels, seen = 7, 0
    laws = [Law(100 + b, top_k, steps) for b in range(6)]
    limit = torch.full((len(laws),), levels)
    growths = list(grow(laws, levels, levels))
    for depth, growth in enumerate(growths[:-1]):
        done = is_saturated(growth, max_nodes)
        for later in growths[depth + 1 :]:
            for b in range(len(laws)):
                if done[b]:
                    seen += 1
                    now = nodes_of(prune(growth.pool, max_nodes, limit), b)
                    assert now == nodes_of(prune(later.pool, max_nodes, limit), b)
    assert seen, "the case never saturates: it shows nothing"


@pytest.mark.parametrize(("top_k", "max_nodes"), [(1, 3), (2, 5), (4, 12)])
def test_not_saturated_means_that_a_certain_child_would_enter(top_k, max_nodes):
    levels = 5
    laws = [Law(200 + b, top_k) for b in range(6)]
    limit = torch.full((len(laws),), levels + 1)
    seen = 0
    for growth in list(grow(laws, levels, levels + 1)):
        done = is_saturated(growth, max_nodes)
        rows = len(laws) * growth.frontier_BK.shape[1]
        certain = Candidates(torch.arange(91, 91 + top_k).repeat(rows, 1), torch.zeros(rows, top_k))
        before = prune(growth.pool, max_nodes, limit)
        after = prune(extend(growth, certain, top_k).pool, max_nodes, limit)
        for b in range(len(laws)):
            if not done[b]:
                seen += 1
                assert nodes_of(before, b) != nodes_of(after, b)
    assert seen


def test_a_rounded_probability_above_one_does_not_lift_a_child_over_its_parent():
    growth = start(Candidates(torch.tensor([[1, 2]]), torch.tensor([[-1.0, -1.0]])), 2, 2)
    children = Candidates(
        torch.tensor([[3, 4], [5, 6]]), torch.tensor([[1e-7, -9.0], [1e-7, -9.0]])
    )
    pool = extend(growth, children, 2).pool
    tree = prune(pool, 2, torch.tensor([2]))
    assert_well_formed(tree)
    assert nodes_of(tree, 0) == [Node((1,), -1.0), Node((2,), -1.0)]


def test_the_likely_path_comes_first():
    """What makes compaction of the usual accepted path free."""
    law = Law(7, 3)
    growth = list(grow([law], 4, 4))[-1]
    tree = prune(growth.pool, 12, torch.tensor([4]))
    path: tuple[int, ...] = ()
    for node in nodes_of(tree, 0):
        if node.path[:-1] != path:
            break
        path = node.path
        assert path[-1] == law(path[:-1])[0][0]
    assert len(path) >= 1


@pytest.mark.parametrize("nodes", [0, 1, 2, 5, 16, 63])
def test_ancestor_matrix(nodes):
    source = random.Random(nodes)
    batch = 9
    parents = [[source.randint(-1, i - 1) for i in range(nodes)] for _ in range(batch - 2)]
    parents += [[i - 1 for i in range(nodes)], [-1] * nodes]  # a chain, a star
    matrix = ancestor_matrix(torch.tensor(parents).view(batch, nodes))
    assert matrix.shape == (batch, nodes, nodes) and matrix.dtype == torch.bool
    for b, row in enumerate(parents):
        for i in range(nodes):
            above, node = {i}, row[i]
            while node >= 0:
                above.add(node)
                node = row[node]
            assert set(matrix[b, i].nonzero().squeeze(1).tolist()) == above
