"""Catches: a slot owned twice, a page lost or never used again, a sequence that moves when it
grows, a gather where a contiguous run was possible.
"""

from __future__ import annotations

import random

import pytest

from eagle4.cache import PageTable

PAGE = 4


def check(table: PageTable) -> None:
    owned = [page for pages in table.pages for page in pages]
    assert len(set(owned)) == len(owned), "a page is owned twice"
    assert all(0 <= page < table.num_pages for page in owned)
    assert table.num_used == len(owned)
    assert table.num_slots == table.num_pages * table.page_size
    for sequence in range(len(table.pages)):
        capacity = table.capacity(sequence)
        slots = table.slots(sequence, 0, capacity)
        assert slots == [table.slot(sequence, i) for i in range(capacity)]
        assert len(set(slots)) == capacity
        start = table.run_start(sequence)
        is_run = capacity > 0 and slots == list(range(slots[0], slots[0] + capacity))
        assert start == (slots[0] if is_run else None)


def free_pages(table: PageTable) -> set[int]:
    return set(range(table.num_pages)) - {page for pages in table.pages for page in pages}


def has_free_run(free: set[int], count: int) -> bool:
    return any(all(first + i in free for i in range(count)) for first in free)


@pytest.mark.parametrize("seed", range(20))
def test_random_growth_and_release(seed):
    rng = random.Random(seed)
    table = PageTable(4, PAGE)
    for _ in range(60):
        sequence = rng.randrange(4)
        if rng.random() < 0.3:
            released = set(table.pages[sequence])
            table.release(sequence)
            assert not table.pages[sequence] and released <= free_pages(table)
            check(table)
            continue
        old, pages, free = list(table.pages[sequence]), table.num_pages, free_pages(table)
        was_run = table.run_start(sequence) is not None
        tokens = rng.randint(1, 40)
        grew = table.ensure(sequence, tokens)
        check(table)
        new = table.pages[sequence]
        missing = len(new) - len(old)
        assert new[: len(old)] == old, "stored entries moved"
        assert len(new) == max(len(old), -(-tokens // PAGE)), "more or less than asked for"
        assert grew == (table.num_pages > pages)
        follows = range(old[-1] + 1, old[-1] + 1 + missing) if old else range(0)
        can_follow = was_run and all(page in free or page >= pages for page in follows)
        can_start = not old and (not free or has_free_run(free, missing))
        if can_follow or can_start:
            assert table.run_start(sequence) is not None, "contiguous was possible"
        if not can_follow:
            assert table.num_pages - pages <= max(0, missing - len(free)), "free pages not used"


def test_released_pages_are_used_again():
    table = PageTable(3, PAGE)
    for round_ in range(50):
        for sequence in range(3):
            table.ensure(sequence, 5 + 4 * sequence)
        assert table.num_pages == 2 + 3 + 4, f"the pool grew in round {round_}"
        for sequence in (1, 0, 2):
            table.release(sequence)
    assert table.num_used == 0


def test_a_hole_in_the_middle_is_used_before_the_pool_grows():
    table = PageTable(4, PAGE)
    for sequence in range(3):
        table.ensure(sequence, 2 * PAGE)
    table.release(1)
    assert not table.ensure(3, 2 * PAGE)
    assert table.pages[3] == [2, 3]


def test_the_last_sequence_of_the_pool_grows_in_place():
    """Free pages elsewhere must not tear its run apart."""
    table = PageTable(3, PAGE)
    for sequence in range(3):
        table.ensure(sequence, 2 * PAGE)
    table.release(0)
    table.ensure(2, 5 * PAGE)
    assert table.pages[2] == [4, 5, 6, 7, 8]


def test_asking_for_less_changes_nothing():
    table = PageTable(1, PAGE)
    assert table.ensure(0, 9) and table.capacity(0) == 12
    for tokens in (0, 1, 9, 12):
        assert not table.ensure(0, tokens)
    assert table.pages == [[0, 1, 2]]


def test_a_slot_beyond_the_pages_is_an_error():
    table = PageTable(1, PAGE)
    table.ensure(0, PAGE)
    with pytest.raises(IndexError):
        table.slot(0, PAGE)
