"""Kernel of `ops.sum_add_norm`: publish, meet, add up, norm, in one launch.

A program owns rows p, p + NUM_PROGRAMS, ... and regions of memory of its own, on every rank. In its
n-th launch, as a number in this rank's memory says, it

1. copies its rows of this rank's part into its region n % 2,
2. writes n behind them, in every rank's memory (release),
3. waits until every rank has written n or more into this one's memory (acquire),
4. reads these rows from every rank's region n % 2, in rank order, and goes on in registers.

One meeting is enough. Who overwrites region n % 2 in launch n + 2 has seen every rank ready in
launch n + 1, and a rank gets there when its launch n, and so its reading, has ended. That program p
of two ranks is in the same launch follows from grids that depend on shapes alone; that launches of
one rank follow each other, from one stream. The count lives on the device, not on the host, so
captured graphs may be replayed in any number; and nothing is ever reset.

A program waits for its namesakes only, which run at the same time: NUM_PROGRAMS programs fit on any
device beside each other. Nothing is launched here with programmatic dependent launch, so parts are
complete when a program begins. Parts come from whatever product is fastest: what a GEMM could save
by writing into the region itself is a copy of at most 128 KiB that are still in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..sizes import power_of_2
from ..sum_add_norm import NUM_PROGRAMS, REGION_BYTES, Peers
from .launch import opaque

_READY_AT = 2 * NUM_PROGRAMS * REGION_BYTES


@triton.jit
def _meet(address_ptr, program, rank, launch, WORLD: tl.constexpr, READY_AT: tl.constexpr):
    """Returns when this program is in this launch, or further, on every rank."""
    peer = tl.arange(0, triton.next_power_of_2(WORLD))
    is_peer = peer < WORLD
    address = tl.load(address_ptr + peer, mask=is_peer, other=0)
    theirs = (address + READY_AT).to(tl.pointer_type(tl.int32)) + program * WORLD + rank
    mine = (tl.load(address_ptr + rank) + READY_AT).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()  # every thread has published its columns
    tl.atomic_xchg(theirs, tl.zeros_like(peer) + launch, mask=is_peer, sem="release", scope="sys")
    num_behind = 1
    while num_behind > 0:
        ready = tl.atomic_add(
            mine + program * WORLD + peer, tl.zeros_like(peer), mask=is_peer,
            sem="acquire", scope="sys",
        )  # fmt: skip
        num_behind = tl.sum(((ready - launch < 0) & is_peer).to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def _sum_add_norm_kernel(
    part_ptr, residual_ptr, gain_ptr, hidden_ptr, normed_ptr, address_ptr,
    rows, width, rank, eps,
    WORLD: tl.constexpr, PROGRAMS: tl.constexpr, REGION: tl.constexpr, READY_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = part_ptr.dtype.element_ty
    program = tl.program_id(0)
    count_ptr = (tl.load(address_ptr + rank) + READY_AT).to(tl.pointer_type(tl.int32))
    count_ptr += PROGRAMS * WORLD + program
    launch = tl.load(count_ptr) + 1
    region = (2 * program + (launch & 1)) * REGION
    column = tl.arange(0, BLOCK)
    here = column < width
    own = tl.multiple_of((tl.load(address_ptr + rank) + region).to(tl.pointer_type(dtype)), 16)
    for row in range(program, rows, PROGRAMS):
        part = tl.load(part_ptr + row * width + column, mask=here)
        tl.store(own + row // PROGRAMS * width + column, part, mask=here)
    _meet(address_ptr, program, rank, launch, WORLD, READY_AT)
    for row in range(program, rows, PROGRAMS):
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):
            base = (tl.load(address_ptr + peer) + region).to(tl.pointer_type(dtype))
            place = tl.multiple_of(base, 16) + row // PROGRAMS * width + column
            total += tl.load(place, mask=here, other=0.0).to(tl.float32)
        place = row * width + column
        residual = tl.load(residual_ptr + place, mask=here, other=0.0).to(tl.float32)
        hidden = (residual + total.to(dtype).to(tl.float32)).to(dtype)
        tl.store(hidden_ptr + place, hidden, mask=here)
        wide = hidden.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        gain = tl.load(gain_ptr + column, mask=here, other=0.0).to(tl.float32)
        normed = gain * (wide * scale).to(dtype).to(tl.float32)
        tl.store(normed_ptr + place, normed.to(dtype), mask=here)
    tl.store(count_ptr, launch)


def _constants(width: int, peers: Peers) -> dict[str, Any]:
    sizes = {"WORLD": len(peers.address_W), "PROGRAMS": NUM_PROGRAMS, "REGION": REGION_BYTES}
    block = power_of_2(width)
    num_warps = min(max(block // 512, 4), 16)
    return sizes | {"READY_AT": _READY_AT, "BLOCK": block, "num_warps": num_warps, "num_stages": 1}


def sum_add_norm(
    part: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, peers: Peers
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ops.sum_add_norm.sum_add_norm`, for what `ops.sum_add_norm.fits`."""
    part, residual, gain = part.contiguous(), residual.contiguous(), gain.contiguous()
    hidden, normed = torch.empty_like(residual), torch.empty_like(residual)
    width = part.shape[-1]
    rows = part.numel() // width
    opaque(_sum_add_norm_kernel)[(min(rows, NUM_PROGRAMS),)](
        part, residual, gain, hidden, normed, peers.address_W,
        rows, width, peers.rank, eps, **_constants(width, peers),
    )  # fmt: skip
    return hidden, normed


def compile_kernel(width: int, dtype: torch.dtype, peers: Peers) -> None:
    """As `ops.sum_add_norm.compile_kernel`."""
    row = torch.empty(2, width, dtype=dtype, device=peers.address_W.device)
    _sum_add_norm_kernel.warmup(
        row, row, row[0], row, row, peers.address_W, 2, width, peers.rank, 1e-6,
        grid=(2,), **_constants(width, peers),
    )  # fmt: skip
