"""Copying pool slots in every layer at once: how an accepted path moves to its place.

After that the cache is laid out as plain decoding would have left it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dispatch import wants_triton

MOST_MOVES = 64  # rows that one kernel program holds


def move_rows(
    pools: Sequence[torch.Tensor],
    source_M: torch.Tensor,
    target_M: torch.Tensor,
    addresses: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """``pool[target] = pool[source]`` for every ``pool [slots, ...]``; all reads come first.

    Pools are whole allocations. int64 slots; overlapping ranges are safe, targets must differ. A
    slot that moves onto itself is padding: so a verdict may stay in device memory and M be the same
    in every round. ``addresses`` (see `row_addresses`) may be kept as long as the pools stay where
    they are.
    """
    if not pools or not source_M.numel():
        return

    def fits() -> bool:
        return len(source_M) <= MOST_MOVES and all(_has_whole_words(pool) for pool in pools)

    if wants_triton(impl, pools[0], fits=fits):
        from .triton.move_rows import move_rows as kernel

        kernel(pools, source_M, target_M, row_addresses(pools) if addresses is None else addresses)
        return
    for pool in pools:
        pool[target_M] = pool[source_M]


def row_addresses(pools: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[pools, 2]`` int64: where every pool begins, and its row in words of 4 bytes."""
    table = [(p.data_ptr(), p.stride(0) * p.element_size() // 4) for p in pools]
    return torch.tensor(table, dtype=torch.int64).to(pools[0].device)


def _has_whole_words(pool: torch.Tensor) -> bool:
    return pool.is_contiguous() and pool.stride(0) * pool.element_size() % 4 == 0
