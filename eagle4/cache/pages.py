"""Which slots belong to which sequence: a page allocator that prefers contiguous runs.

Pages of one sequence that follow each other let attention read the sequence as a view instead of
a gather. Host-side integers only; no tensor is touched here.
"""

from __future__ import annotations


class PageTable:
    """Page lists of ``num_sequences`` sequences over a pool that may grow.

    ``page_size`` slots a page. `ensure` returns True when the number of slots grew, so that the
    owner resizes its pools.
    """

    def __init__(self, num_sequences: int, page_size: int = 64):
        self.page_size = page_size
        self.pages: list[list[int]] = [[] for _ in range(num_sequences)]
        self.num_pages = 0
        self._free: set[int] = set()

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def capacity(self, sequence: int) -> int:
        return len(self.pages[sequence]) * self.page_size

    def ensure(self, sequence: int, num_tokens: int) -> bool:
        """Give the sequence room for ``num_tokens`` slots. True when the pool has to grow."""
        owned = self.pages[sequence]
        missing = -(-num_tokens // self.page_size) - len(owned)
        if missing <= 0:
            return False
        before = self.num_pages
        # Once its run is broken, a sequence is gathered anyway and takes what is free.
        is_run = self.run_start(sequence) is not None
        owned += self._take(owned[-1] + 1 if is_run else None, missing)
        return self.num_pages > before

    def _take(self, wanted: int | None, count: int) -> list[int]:
        """Pages from ``wanted`` on, else a free run, else free pages before new ones."""
        start = wanted
        if wanted is None or not self._is_open(wanted, count):
            start = self._first_free_run(count)
        if start is None:
            pages = sorted(self._free)[:count]
            pages += range(self.num_pages, self.num_pages + count - len(pages))
        else:
            pages = list(range(start, start + count))
        self._free.difference_update(pages)
        self.num_pages = max(self.num_pages, pages[-1] + 1)
        return pages

    def _is_open(self, first: int, count: int) -> bool:
        """Whether these pages are free or lie beyond the end, where the pool can grow."""
        return all(p in self._free or p >= self.num_pages for p in range(first, first + count))

    def _first_free_run(self, count: int) -> int | None:
        """The first page of the first free run of that length."""
        start = previous = None
        for page in sorted(self._free):
            if start is None or page - 1 != previous:
                start = page
            if page - start + 1 == count:
                return start
            previous = page
        return None

    def release(self, sequence: int) -> None:
        """Return all pages of the sequence."""
        self._free.update(self.pages[sequence])
        self.pages[sequence] = []

    def slot(self, sequence: int, index: int) -> int:
        """Slot of the sequence's ``index``-th token."""
        page, offset = divmod(index, self.page_size)
        return self.pages[sequence][page] * self.page_size + offset

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        """Slots of tokens ``start .. stop - 1``."""
        return [self.slot(sequence, index) for index in range(start, stop)]

    def padded(self, sequences: list[int], most: int | None = None) -> list[list[int]]:
        """The first ``most`` pages (None: all) of every sequence, as long as the longest list.

        What pads a sequence is its own first page, which nobody looks at there.
        """
        rows = [self.pages[sequence][:most] for sequence in sequences]
        longest = max(map(len, rows)) if most is None else most
        return [row + row[:1] * (longest - len(row)) for row in rows]

    def run_start(self, sequence: int) -> int | None:
        """First slot when all pages of the sequence follow each other, else None."""
        owned = self.pages[sequence]
        if owned and owned[-1] - owned[0] == len(owned) - 1 and _is_consecutive(owned):
            return owned[0] * self.page_size
        return None

    @property
    def num_used(self) -> int:
        """Pages that belong to a sequence."""
        return self.num_pages - len(self._free)


def _is_consecutive(pages: list[int]) -> bool:
    return all(b == a + 1 for a, b in zip(pages, pages[1:], strict=False))
