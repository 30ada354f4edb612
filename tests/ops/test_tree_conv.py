"""Catches: a convolution over neighbours instead of ancestors, an offset of one at the border to
the committed inputs, a bias or a sequence that is mixed up.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from eagle4.ops import chain_conv, conv_sources, tree_conv
from eagle4.tree import ancestor_matrix

BATCH, CHANNELS = 3, 5


def path(parent: list[int], row: int) -> list[int]:
    found = [row]
    while parent[found[0]] >= 0:
        found.insert(0, parent[found[0]])
    return found


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_every_row_convolves_its_own_path(width, has_bias):
    for seed in range(20):
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        rows = rng.randint(1, 9)
        parent = [[-1] + [rng.randrange(i) for i in range(1, rows)] for _ in range(BATCH)]
        x = torch.randn(BATCH, rows, CHANNELS, generator=g)
        committed = torch.randn(BATCH, width - 1, CHANNELS, generator=g)
        weight = torch.randn(CHANNELS, width, generator=g)
        bias = torch.randn(CHANNELS, generator=g) if has_bias else None
        sources = conv_sources(ancestor_matrix(torch.tensor(parent)), width)
        found = tree_conv(x, committed, weight, bias, sources)
        for b in range(BATCH):
            for row in range(rows):
                line = torch.cat([committed[b], x[b, path(parent[b], row)]])
                wanted = functional.conv1d(line.T[None], weight[:, None], bias, groups=CHANNELS)[
                    0, :, -1
                ]
                assert torch.allclose(found[b, row], wanted, atol=1e-5)


def test_a_chain_is_the_tree_of_width_1():
    x, committed = torch.randn(1, 12, CHANNELS), torch.randn(1, 3, CHANNELS)
    weight, bias = torch.randn(CHANNELS, 4), torch.randn(CHANNELS)
    ancestors = torch.ones(1, 12, 12, dtype=torch.bool).tril()
    wanted = tree_conv(x, committed, weight, bias, conv_sources(ancestors, 4))[0]
    found = chain_conv(torch.cat([committed[0], x[0]]), weight, bias)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_bf16_rows_stay_bf16():
    x, committed = torch.randn(1, 2, CHANNELS).bfloat16(), torch.zeros(1, 3, CHANNELS).bfloat16()
    weight = torch.randn(CHANNELS, 4).bfloat16()
    sources = conv_sources(torch.ones(1, 2, 2, dtype=torch.bool).tril(), 4)
    found = tree_conv(x, committed, weight, None, sources)
    exact = tree_conv(x.float(), committed.float(), weight.float(), None, sources)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())
