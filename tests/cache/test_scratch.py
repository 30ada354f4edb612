"""Catches: drafted rows that are written or read elsewhere than a step of their own would do it,
rows that see a stranger's scratch, sliding windows measured by index instead of position, a paged
view that disagrees with the mask.
"""

from __future__ import annotations

import random

import pytest
import torch

from eagle4.cache import (
    Expanded,
    PageTable,
    Window,
    attend_layer,
    build_step,
    make_scratch,
    scratch_layer,
)

HEADS, WIDTH, ENTRIES = 2, 8, 6


def fragmented(lengths: list[int]) -> PageTable:
    """Sequences whose pages alternate, so that none is a run."""
    table = PageTable(len(lengths), page_size=4)
    for size in range(4, max(lengths) + ENTRIES + 4, 4):
        for sequence, length in enumerate(lengths):
            if size - 4 < length + ENTRIES:
                table.ensure(sequence, size)
    return table


def contiguous(lengths: list[int]) -> PageTable:
    table = PageTable(len(lengths), page_size=4)
    for sequence in range(len(lengths)):
        table.ensure(sequence, max(lengths) + ENTRIES)
    return table


@pytest.mark.parametrize("make", [contiguous, fragmented], ids=lambda make: make.__name__)
@pytest.mark.parametrize("lengths", [[9], [7, 2, 11]], ids=str)
@pytest.mark.parametrize("window", [None, 4], ids=["full", "window"])
@pytest.mark.parametrize("seed", range(4))
def test_a_level_attends_like_a_step_of_its_own(make, lengths, window, seed):
    source, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    table, batch = make(lengths), len(lengths)
    first, most = source.choice([(0, 1), (1, 2), (2, 3)])
    depth = torch.tensor([source.randint(0, 2) for _ in range(ENTRIES)])
    sees = torch.rand(batch, most, ENTRIES, generator=noise) < 0.5
    sees[:, :, first + most :] = False
    for row in range(most):
        sees[:, row, first + row] = True
        sees[:, row, first : first + row] = sees[:, row, first + row + 1 : first + most] = False
    depth[first : first + most] = 3
    prefix = torch.tensor(lengths)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=noise)

    pools = [normal(table.num_slots, HEADS, WIDTH) for _ in range(2)]
    for pool in pools:  # what nobody wrote must not count
        for b, length in enumerate(lengths):
            pool[table.slots(b, length + first + most, length + ENTRIES)] = 1e30
    rows = batch * most
    query, key, value = normal(rows, 4, WIDTH), *(normal(rows, HEADS, WIDTH) for _ in range(2))
    windows = [
        Window(b, length, first, length + depth[: first + most], sees[b, :, : first + most])
        for b, length in enumerate(lengths)
    ]
    own = [pool.clone() for pool in pools]
    step = build_step(table, windows, query.device)
    wanted = attend_layer(
        step.layer(own[0], own[1], 2, window), query, key, value, sliding_window=window
    )
    expanded = Expanded(
        torch.tensor(first),
        sees,
        (prefix + 3).unsqueeze(1).expand(-1, most),
        prefix.unsqueeze(1) + depth,
    )
    owners = list(enumerate(lengths))
    for gathers, paged in ((False, False), (True, False), (False, True)):
        scratch = make_scratch(table, owners, ENTRIES, query.device, gathers, paged)
        assert (scratch.page_BP is not None) == paged
        written = [pool.clone() for pool in pools]
        layer = scratch_layer(scratch, *written, expanded, 2, window)
        found = attend_layer(layer, query, key, value, sliding_window=window)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for a, b in zip(written, own, strict=True):
            assert torch.equal(a, b)
