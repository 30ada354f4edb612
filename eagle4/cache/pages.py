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
        for _ in range(missing):
            owned.append(self._take(owned[-1] + 1 if owned else None, missing))
        return self.num_pages > before

    def _take(self, wanted: int | None, run: int) -> int:
        if wanted is not None and wanted in self._free:
            self._free.remove(wanted)
            return wanted
        page = self._first_free_run(run)
        if page is None:
            page = self.num_pages
            self.num_pages += 1
            return page
        self._free.remove(page)
        return page

    def _first_free_run(self, run: int) -> int | None:
        """The first page of the first free run of that length, else the lowest free page."""
        free = sorted(self._free)
        start = 0
        for i, page in enumerate(free):
            if i and page != free[i - 1] + 1:
                start = i
            if i - start + 1 == run:
                return free[start]
        return free[0] if free else None

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
