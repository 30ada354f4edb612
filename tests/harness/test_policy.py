"""Catches: a node that is verified without its parent, more nodes than pay, a level drafted at a
loss or refused at a gain, a bucket's free rows left empty, ties that depend on the sorting,
decisions that differ between the readable policy and its twins in one bit.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from eagle4.harness import device_policy
from eagle4.harness.acceptance import Experience
from eagle4.harness.fixed_point import ONE, multiply
from eagle4.harness.policy import Prices, acceptances, best_worth, choose, next_level
from tests.harness.states import Shape, prices_of, random_book, random_states

MS = 1_000_000


def share(p: float) -> int:
    return round(p * ONE)


def prices(token_ms: float, row_ms: float, level_ms: float = 1, rows: int = 16, nodes: int = 16):
    verify = [int((20 + row_ms * n) * MS) for n in range(rows + 1)]
    return Prices(int(token_ms * MS), verify, [int(level_ms * MS)] * 5, nodes)


def brute_force(pool, cost: Prices) -> int:
    """The best net worth over all subsets."""
    values = [s * cost.token_ns >> 30 for row in pool for s in row]
    sets = itertools.chain.from_iterable(
        itertools.combinations(values, n)
        for n in range(min(len(values), len(cost.verify_ns) - 1) + 1)
    )
    return max(sum(s) - (cost.verify_ns[len(s)] - cost.verify_ns[0]) for s in sets)


def test_nodes_are_verified_while_they_pay():
    pool = [[share(p) for p in (0.6, 0.3, 0.1, 0.04)]]
    assert choose(pool, prices(20, 1)) == [[0, 1, 2]]  # 0.04 * 20 ms < 1 ms
    assert choose(pool, prices(20, 13)) == [[]]
    assert choose(pool, prices(20, 0)) == [[0, 1, 2, 3]]
    assert choose(pool, prices(20, 1, nodes=2)) == [[0, 1]]


def test_free_rows_of_a_bucket_are_filled():
    verify = [20 * MS] + [28 * MS] * 4 + [40 * MS]
    cost = Prices(20 * MS, verify, [MS] * 5, 16)
    assert choose([[share(p) for p in (0.6, 0.1, 0.02, 0.01, 0.3)]], cost) == [[0, 1, 2, 4]]


def test_every_sequence_gets_what_its_nodes_are_worth():
    pool = [[share(0.9), share(0.8)], [share(0.05), share(0.02)], [share(0.5), share(0.1)]]
    assert choose(pool, prices(20, 3)) == [[0, 1], [], [0]]


def test_ties_go_to_the_earlier_sequence_and_node():
    half = share(0.5)
    cost = Prices(20 * MS, [20 * MS, 21 * MS, 22 * MS, 90 * MS], [MS] * 5, 16)
    assert choose([[half, half], [half, half]], cost) == [[0, 1], []]


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_sets_and_closed_under_ancestors(seed):
    rng = random.Random(seed)
    parent = [-1] + [rng.randint(-1, i - 1) for i in range(1, 9)]
    pool = []
    for i, p in enumerate(parent):
        pool.append(rng.randint(0, ONE if p < 0 else pool[p]) if i else rng.randint(0, ONE))
    cost = prices(rng.choice((5, 20, 60)), rng.choice((0, 1, 4)), rows=9)
    chosen = choose([pool], cost)[0]
    worth = sum(pool[i] * cost.token_ns >> 30 for i in chosen)
    assert worth - (cost.verify_ns[len(chosen)] - cost.verify_ns[0]) == brute_force([pool], cost)
    assert best_worth(pool, cost) == brute_force([pool], cost)
    assert all(parent[i] < 0 or parent[i] in chosen for i in chosen)


def decide(survival: float, cost: Prices, depth: int = 1, max_depth: int = 12):
    book = Experience().book()
    pool = [[share(survival), share(survival / 4)]]
    frontier, probs = pool, [[share(0.6), share(0.2)]]
    return next_level(pool, frontier, probs, depth, max_depth, 1, 2, book, cost)


def test_a_level_is_drafted_while_its_gain_exceeds_its_cost():
    assert decide(0.9, prices(20, 1, level_ms=4)).go
    assert not decide(0.2, prices(20, 1, level_ms=4)).go
    assert not decide(0.9, prices(20, 1, level_ms=20)).go
    assert not decide(0.9, prices(20, 20, level_ms=1)).go, "verification eats it"
    assert not decide(0.9, prices(20, 1), depth=12).go


def test_width_follows_what_it_costs():
    narrow = prices(20, 0.2, level_ms=4)
    wide = narrow._replace(level_ns=[0, 4 * MS, 4 * MS, 4 * MS, 4 * MS])
    steep = narrow._replace(level_ns=[0, 4 * MS, 30 * MS, 60 * MS, 90 * MS])
    assert decide(0.8, wide).width == 2 and decide(0.8, steep).width == 1


def test_several_levels_may_pay_where_one_does_not():
    verify = [20 * MS] + [30 * MS] * 9
    cost = Prices(14 * MS, verify, [0, MS, 5 * MS], 16)
    book = Experience().book()._replace(chain=[ONE * 9 // 10] * 10)
    pool = [[share(0.4)]]
    assert best_worth(pool[0], cost) == 0
    for max_depth, is_worth_it in ((2, False), (3, False), (5, True)):
        decision = next_level(pool, pool, [[share(0.6)]], 1, max_depth, 1, 1, book, cost)
        assert decision.go is is_worth_it


def compare(count: int, per_shape: int, seed: int) -> int:
    """Compare the twins on random rounds; returns how many were compared."""
    rng, generator, done = random.Random(seed), torch.Generator().manual_seed(seed), 0
    while done < count:
        shape, book = Shape(rng), random_book(rng)
        pool, frontier, probs, device_prices = random_states(generator, shape, per_shape)
        device_book = device_policy.device_book(book)
        limits = (shape.depth, shape.max_depth, shape.min_width, shape.top_k)
        found = device_policy.next_level(
            *(pool, frontier, probs, *shape.depths(), shape.min_width, shape.top_k),
            *(shape.max_nodes, device_book, device_prices),
        )
        chosen = device_policy.choose(pool, shape.max_nodes, device_prices)
        depth = torch.tensor(shape.depth)
        child = device_policy.survivals(frontier, probs.unsqueeze(-1), depth, device_book)
        lists = [t.tolist() for t in (pool, frontier, probs, *found, child)]
        for z in range(per_shape):
            own_pool, own_frontier, own_probs, go, width, gain, own_child = (t[z] for t in lists)
            cost = prices_of(device_prices, z, shape.max_nodes)
            expected = next_level(own_pool, own_frontier, own_probs, *limits, book, cost)
            assert (go, width, gain) == expected, (seed, done + z)
            sets = [chosen[z, b].nonzero().flatten().tolist() for b in range(shape.batch)]
            assert sets == choose(own_pool, cost), (seed, done + z)
        for b, k in itertools.product(range(shape.batch), range(shape.width)):
            chance = acceptances([own_probs[b][k]], shape.depth, book)[0]
            assert own_child[b][k] == [multiply(own_frontier[b][k], chance)]
        done += per_shape
    return done


def test_the_tensor_twin_agrees_bit_for_bit():
    assert compare(4_000, 100, seed=0) == 4_000


@pytest.mark.slow
def test_the_tensor_twin_agrees_bit_for_bit_on_100_000_states():
    assert compare(100_000, 500, seed=1) == 100_000


def test_the_twin_compiles_without_a_break():
    shape = Shape(random.Random(3))
    book = device_policy.device_book(random_book(random.Random(3)))
    pool, frontier, probs, cost = random_states(torch.Generator().manual_seed(3), shape, 2)
    depths = torch.tensor(1), torch.tensor(12)

    def both(pool, frontier, probs, cost):
        level = device_policy.next_level(pool, frontier, probs, *depths, 1, 2, 8, book, cost)
        return level, device_policy.choose(pool, 8, cost)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for a, b in zip(
        torch.utils._pytree.tree_leaves(compiled(pool, frontier, probs, cost)),
        torch.utils._pytree.tree_leaves(both(pool, frontier, probs, cost)),
        strict=True,
    ):
        assert torch.equal(a, b)
