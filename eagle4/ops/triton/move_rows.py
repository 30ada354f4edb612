"""Kernel of `ops.move_rows`: all layers in one launch, through a table of addresses.

A program takes some words of every moved row of one pool: it reads them all, waits, and writes.
No other program touches these words, so overlapping moves are safe. Words are 4 bytes whatever the
dtype. The op is opaque (`custom_op`): the kernel gets addresses, from which the compiler could not
tell that the pools change; the schema says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..sizes import ceil_div, power_of_2
from .launch import opaque

_TILE = 4096  # words of one program


@triton.jit
def _move_kernel(
    address_ptr, source_ptr, target_ptr, moves,
    MOVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = address_ptr + 2 * tl.program_id(0)
    base = tl.load(entry).to(tl.pointer_type(tl.int32))
    width = tl.load(entry + 1)
    m = tl.arange(0, MOVES)
    source = tl.load(source_ptr + m, mask=m < moves, other=0)
    target = tl.load(target_ptr + m, mask=m < moves, other=0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (source != target)[:, None] & (word < width)[None, :]
    content = tl.load(base + source[:, None] * width + word[None, :], mask=mask)
    tl.debug_barrier()  # all reads of these words come before any write
    tl.store(base + target[:, None] * width + word[None, :], content, mask=mask)


@torch.library.custom_op("eagle4::move_rows", mutates_args={"pools"})
def _move_rows(
    pools: list[torch.Tensor],
    addresses: torch.Tensor,
    source_M: torch.Tensor,
    target_M: torch.Tensor,
) -> None:
    moves = power_of_2(len(source_M))
    widest = max(pool.stride(0) * pool.element_size() // 4 for pool in pools)
    block = max(min(_TILE // moves, power_of_2(widest)), 1)
    opaque(_move_kernel)[(len(pools), ceil_div(widest, block))](
        addresses, source_M, target_M, len(source_M), MOVES=moves, BLOCK=block, num_warps=4
    )


@_move_rows.register_fake
def _(
    pools: list[torch.Tensor],
    addresses: torch.Tensor,
    source_M: torch.Tensor,
    target_M: torch.Tensor,
) -> None:
    return None


def move_rows(
    pools: Sequence[torch.Tensor],
    source_M: torch.Tensor,
    target_M: torch.Tensor,
    addresses: torch.Tensor,
) -> None:
    """As `ops.move_rows.move_rows`."""
    _move_rows(list(pools), addresses, source_M.contiguous(), target_M.contiguous())
