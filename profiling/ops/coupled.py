"""Coupled draws from whole rows of scores.

python profiling/ops/coupled.py
"""

from __future__ import annotations

from collections.abc import Iterator

from ceiling import Case, Setup, main, size_of

from eagle4.ops import coupled_rows


def cases(setup: Setup) -> Iterator[Case]:
    vocab = 49_152 if setup.is_small else 151_936
    for rows in (1, 17, 136):
        score, key = setup.randn(rows, vocab).float(), setup.integers(1 << 62, rows)

        def run(impl: str, score=score, key=key):
            return coupled_rows(score, key, impl)

        yield Case(f"rows {rows} vocabulary {vocab}", size_of(score), run)


if __name__ == "__main__":
    main("coupled", cases)
