"""Compaction of an accepted path in all layers, beside copying the same rows.

python profiling/ops/move_rows.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ceiling import Case, Setup, main, size_of

from eagle4.ops import move_rows, row_addresses


def cases(setup: Setup) -> Iterator[Case]:
    layers, heads, width = (30, 3, 64) if setup.is_small else (36, 8, 128)
    pools = [setup.randn(4096, heads, width) for _ in range(2 * layers)]
    addresses = row_addresses(pools)
    for moves in (1, 4, 16, 64):
        source = torch.arange(moves, device=setup.device) * 2 + 101
        target = torch.arange(moves, device=setup.device) + 100

        def run(impl: str, source=source, target=target):
            return move_rows(pools, source, target, addresses, impl)

        num_bytes = 2 * moves * sum(size_of(pool[0]) for pool in pools)
        yield Case(f"{layers} layers {moves} rows", num_bytes, run)


if __name__ == "__main__":
    main("move_rows", cases)
