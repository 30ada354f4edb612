"""Catches: stored keys or values that are lost, swapped or smeared when the pool stores, moves,
grows, or holds layers of different shapes.
"""

from __future__ import annotations

import pytest
import torch
from packed import store

from eagle4.cache import KVPool


def rows(count: int, heads: int = 2, width: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, width, generator=generator)


def filled(num_slots: int = 10) -> KVPool:
    """Layers 0 and 5, with K and V of different widths, all slots written."""
    pool = KVPool()
    pool.resize(num_slots)
    slots = torch.arange(num_slots)
    store(pool, 0, slots, rows(num_slots, seed=1), rows(num_slots, width=5, seed=2))
    store(pool, 5, slots, rows(num_slots, heads=1, seed=3), rows(num_slots, heads=1, seed=4))
    return pool


def content(pool: KVPool) -> dict:
    return {k: (pair[0].clone(), pair[1].clone()) for k, pair in pool.layers.items()}


def test_rows_land_in_their_slots_and_nowhere_else():
    pool = KVPool()
    pool.resize(6)
    key, value = rows(3, seed=1), rows(3, width=5, seed=2)
    slots = torch.tensor([4, 0, 3])
    stored = store(pool, 0, slots, key, value)
    assert stored[0] is pool.layers[0][0]
    for tensor, wanted in zip(stored, (key, value), strict=True):
        assert torch.equal(tensor[slots], wanted)
        assert not tensor[[1, 2, 5]].any(), "unwritten slots must be zeros, never NaN"
    store(pool, 0, torch.tensor([0]), 2 * key[:1], value[:1])
    assert torch.equal(pool.layers[0][0][0], 2 * key[0])
    assert torch.equal(pool.layers[0][0][[4, 3]], key[[0, 2]])


def test_the_pool_does_not_keep_the_callers_tensors():
    pool = KVPool()
    pool.resize(2)
    key = rows(2)
    store(pool, 0, torch.arange(2), key, key)
    kept = pool.layers[0][0].clone()
    key.zero_()
    assert torch.equal(pool.layers[0][0], kept) and torch.equal(pool.layers[0][1], kept)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([3, 4, 5], [2, 3, 4]),
        ([2, 3, 4], [3, 4, 5]),
        ([1, 7], [7, 1]),
        ([9], [0]),
        ([4, 2, 0], [2, 0, 4]),
        ([], []),
    ],
)
def test_overlapping_moves_read_before_they_write(source, target):
    pool = filled()
    before = content(pool)
    pool.move(torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    for layer, pair in pool.layers.items():
        for tensor, old in zip(pair, before[layer], strict=True):
            wanted = old.clone()
            for read, write in zip(source, target, strict=True):
                wanted[write] = old[read]
            assert torch.equal(tensor, wanted)


def test_growing_keeps_everything_and_shrinking_does_nothing():
    pool = filled()
    before = content(pool)
    pool.resize(25)
    assert pool.num_slots == 25
    for layer, pair in pool.layers.items():
        for tensor, old in zip(pair, before[layer], strict=True):
            assert len(tensor) == 25 and torch.equal(tensor[:10], old) and not tensor[10:].any()
    grown = {layer: pair[0].data_ptr() for layer, pair in pool.layers.items()}
    pool.resize(3)
    pool.resize(25)
    assert pool.num_slots == 25
    assert grown == {layer: pair[0].data_ptr() for layer, pair in pool.layers.items()}
    # A layer that appears late has the size of the others.
    store(pool, 7, torch.tensor([24]), rows(1), rows(1))
    assert len(pool.layers[7][0]) == 25


def test_bytes_are_those_of_all_layers():
    assert filled().num_bytes == 4 * 10 * (2 * 3 + 2 * 5 + 3 + 3)
