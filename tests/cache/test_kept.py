"""Catches: pools that move from call to call, that are given away while they are in use, that show
what an earlier call stored, or that pile up."""

from __future__ import annotations

import pytest
import torch

from eagle4.cache.kept import MOST, KeptPools

ROWS = torch.ones(3, 2, 4)


def filled(kept: KeptPools, num_slots: int = 100):
    pool = kept.pool()
    pool.resize(num_slots)
    for layer in range(2):
        for tensor in pool.pair(layer, ROWS, ROWS):
            tensor.fill_(7.0)
    return pool


def places(pool) -> list[int]:
    return [tensor.data_ptr() for pair in pool.layers.values() for tensor in pair]


def test_the_next_pool_lies_where_the_last_one_lay():
    kept = KeptPools()
    pool = filled(kept)
    before = places(pool)
    del pool
    pool = kept.pool()
    pool.resize(128)  # there was room for a power of two
    assert places(pool) == before
    assert all(tensor.abs().sum() == 0 for pair in pool.layers.values() for tensor in pair)
    pool.pair(0, ROWS, ROWS)[0].fill_(3.0)
    pool.resize(129)
    assert places(pool) != before
    assert pool.layers[0][0].shape[0] == 256 and pool.layers[0][0].sum() == 3.0 * 128 * 8
    moved = places(pool)
    del pool
    assert places(kept.pool()) == moved


def test_a_pool_in_use_is_not_given_away():
    kept = KeptPools()
    first = filled(kept)
    second = filled(kept)
    assert not set(places(first)) & set(places(second))
    assert all(tensor.min() == 7.0 for pair in first.layers.values() for tensor in pair)
    place = places(first)
    del first
    assert places(kept.pool()) == place
    third = [filled(kept) for _ in range(4)]
    assert len({place for pool in third for place in places(pool)}) == 16
    assert len(kept._kept) == MOST
    kept.clear()
    del third
    assert not kept.pool().layers


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_and_back(first):
    kept = KeptPools()
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            pool = filled(kept, 100)
            pool.resize(200)
            pool.layers[0][0].fill_(1.0)
            del pool
