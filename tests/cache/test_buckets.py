"""Catches: a bucket that is too small, added rows that write over others, are seen by others or
see something else than the row that they repeat; keys read where a sequence owns nothing.
"""

from __future__ import annotations

import pytest
import torch

from eagle4.cache import PageTable, Window, build_step, make_scratch
from eagle4.cache.buckets import LEAST_ENTRIES, MOST_ROWS, bucket_length, bucket_rows, widen


def test_buckets_hold_what_they_are_for_and_are_few():
    sizes = [bucket_rows(rows) for rows in range(1, MOST_ROWS + 1)]
    assert all(size >= rows for rows, size in enumerate(sizes, start=1))
    assert set(sizes) == {1, 2, 3, 5, 9, 17, 33, 65}
    assert bucket_rows(MOST_ROWS + 1) == MOST_ROWS + 1
    lengths = [bucket_length(length, True) for length in range(1, 1000)]
    assert all(size >= length for length, size in enumerate(lengths, start=1))
    assert set(lengths) == {LEAST_ENTRIES, 256, 512, 1024}
    assert bucket_length(300, False) == 300


def windows() -> list[Window]:
    """Three rows behind two entries that are stored already, and one row."""
    visible = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 0, 0, 1]], dtype=torch.bool)
    one = Window(0, 4, 2, torch.tensor([4, 5, 6, 7, 8]), visible)
    return [one, Window(1, 60, 0, torch.tensor([60]), torch.ones(1, 1, dtype=torch.bool))]


@pytest.mark.parametrize("paged", [False, True])
def test_added_rows_repeat_the_first_and_are_seen_by_none(paged):
    table = PageTable(2, page_size=16)
    for sequence, length in enumerate((12, 70)):
        table.ensure(sequence, length)
    device = torch.device("cpu")
    usual = build_step(table, windows(), device, paged=paged, gathers=True)
    wide = [widen(window, 5) for window in windows()]
    padded = build_step(table, wide, device, paged=paged, bucketed=True)
    own = [0, 1, 2, 5]
    assert padded.slot_R[own].tolist() == usual.slot_R.tolist()
    assert padded.position_R[own].tolist() == usual.position_R.tolist()
    assert len(padded.slot_R) == len(set(padded.slot_R.tolist())) == 10
    assert padded.position_R.tolist() == [6, 7, 8, 6, 6, 60, 60, 60, 60, 60]
    if paged:
        assert padded.view is not None and usual.view is not None
        assert padded.view.page_BP.shape == (2, 8)  # five pages
        width = usual.view.bits_BMX.shape[2]
        assert torch.equal(padded.view.bits_BMX[:, :3, :width], usual.view.bits_BMX)
        assert torch.equal(padded.view.bits_BMX[:, 3:], padded.view.bits_BMX[:, :1].expand(2, 2, 1))
        return
    longest = usual.shape[2]
    assert padded.shape == (2, 5, LEAST_ENTRIES)
    assert torch.equal(padded.visible_BML[:, :3, :longest], usual.visible_BML)
    assert not padded.visible_BML[:, :, longest:].any()
    assert torch.equal(padded.visible_BML[:, 3:], padded.visible_BML[:, :1].expand(2, 2, -1))


def test_what_a_sequence_has_not_got_is_its_first_entry():
    """Not another sequence's, and nothing that was left behind its own."""
    table = PageTable(2, page_size=16)
    for sequence, length in enumerate((20, 70)):
        table.ensure(sequence, length)
    device = torch.device("cpu")
    scratch = make_scratch(table, [(0, 9), (1, 61)], 4, device, paged=False, bucketed=True)
    assert scratch.slot_BL is not None and scratch.slot_BL.shape == (2, LEAST_ENTRIES)
    assert scratch.length == LEAST_ENTRIES and not scratch.stride
    for sequence, length in enumerate((13, 65)):
        slots = table.slots(sequence, 0, length)
        wanted = slots + slots[:1] * (LEAST_ENTRIES - length)
        assert scratch.slot_BL[sequence].tolist() == wanted
    alone = make_scratch(table, [(1, 61)], 4, device, paged=False, bucketed=True)
    assert alone.slot_BL is not None
    pages = make_scratch(table, [(0, 9), (1, 61)], 4, device, paged=True, bucketed=True)
    assert pages.page_BP is not None and pages.page_BP.shape == (2, 8)
