"""Kernels of `ops.next_level`: one program sorts, prices and cuts one round.

A round has at most `ops.next_level.MOST_BLOCK` nodes, so it fits into one program; there is no
atomic and no floating point, and the result equals the torch reference bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..next_level import BITS, INDEX_BITS, MOST_BLOCK
from ..sizes import power_of_2
from .launch import wrap_triton

_BITS = tl.constexpr(BITS)
_INDEX_BITS = tl.constexpr(INDEX_BITS)
_PATH = 1 << 16  # codes of line nodes: _PATH + level


@triton.jit
def _net(ordered, place, token_ns, verify_ptr, rows):
    """Net worth of taking the first place + 1 nodes; -1 where that is not allowed."""
    base = tl.load(verify_ptr)
    allowed = place + 1 < rows
    cost = tl.load(verify_ptr + place + 1, mask=allowed, other=0)
    worth = (ordered * token_ns) >> _BITS
    net = tl.cumsum(worth, 0) - (cost - base)
    return tl.where(allowed & (worth > 0), net, -1)


@triton.jit
def _worth(survival, place, token_ns, verify_ptr, rows):
    """Largest net worth of these nodes, at least 0."""
    ordered = tl.sort(survival, descending=True)
    return tl.maximum(tl.max(_net(ordered, place, token_ns, verify_ptr, rows), 0), 0)


@triton.jit
def _offer_kernel(
    value_ptr, code_ptr, token_ptr, verify_ptr, offer_ptr, gain_ptr, width_ptr,
    nodes, rows, offers,
    MIN_WIDTH: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PATH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < nodes
    value = tl.load(value_ptr + z * nodes + place, mask=inside, other=0)
    code = tl.load(code_ptr + place, mask=inside, other=0)
    token_ns = tl.load(token_ptr + z)
    verify_ptr += z * rows
    offer_ptr += z * offers
    now = _worth(tl.where(code < 0, value, 0), place, token_ns, verify_ptr, rows)
    best = now * 0
    best_width = now * 0
    for width in tl.static_range(MIN_WIDTH, WIDTH + 1):
        worth = _worth(tl.where(code < width, value, 0), place, token_ns, verify_ptr, rows)
        gain = worth - now - tl.load(offer_ptr + width - MIN_WIDTH)
        best_width = tl.where(gain > best, width, best_width)
        best = tl.maximum(gain, best)
    # Both horizons: the second is 0 where there is one only, the first where there is none.
    for turn in tl.static_range(2):
        levels = FIRST if turn == 0 else SECOND
        if levels > 0:
            on_line = (code < 1) | ((code >= PATH) & (code <= PATH + levels))
            worth = _worth(tl.where(on_line, value, 0), place, token_ns, verify_ptr, rows)
            gain = worth - now - tl.load(offer_ptr + WIDTH + 1 - MIN_WIDTH + turn)
            best_width = tl.where(gain > best, MIN_WIDTH, best_width)
            best = tl.maximum(gain, best)
    tl.store(gain_ptr + z, best)
    tl.store(width_ptr + z, best_width)


@triton.jit
def _choose_kernel(
    survival_ptr, token_ptr, verify_ptr, chosen_ptr, batch, nodes, rows,
    MAX_NODES: tl.constexpr, BATCH: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BATCH)[:, None]
    i = tl.arange(0, NODES)[None, :]
    inside = (b < batch) & (i < nodes)
    offset = z * batch * nodes + b * nodes + i
    survival = tl.load(survival_ptr + offset, mask=inside, other=0)
    token_ns = tl.load(token_ptr + z)
    # Padding gets key -1: below every real node.
    key = tl.where(inside, (survival << _INDEX_BITS) | (batch * nodes - 1 - (b * nodes + i)), -1)
    ordered = tl.sort(key, descending=True)
    kept = tl.where(i < MAX_NODES, ordered, -1)
    least = tl.min(tl.where(i < MAX_NODES, ordered, 1 << 62), 1)
    flat = tl.sort(tl.reshape(kept, [BATCH * NODES]), descending=True)
    place = tl.arange(0, BATCH * NODES)
    worthy = tl.maximum(flat, 0) >> _INDEX_BITS
    net = _net(worthy, place, token_ns, verify_ptr + z * rows, rows)
    best = tl.max(net, 0)
    last = tl.min(tl.where(net == best, place, BATCH * NODES - 1), 0)
    threshold = tl.sum(tl.where(place == last, flat, 0), 0)
    threshold = tl.where(best > 0, threshold, 1 << 62)
    chosen = (key >= threshold) & (key >= least[:, None]) & inside
    tl.store(chosen_ptr + offset, chosen.to(tl.int8), mask=inside)


@torch.library.triton_op("eagle4::best_offer", mutates_args=())
def _best_offer(
    value_ZM: torch.Tensor,
    code_M: torch.Tensor,
    token_ns_Z: torch.Tensor,
    verify_ns_ZR: torch.Tensor,
    offer_ns_ZO: torch.Tensor,
    min_width: int,
    width: int,
    first: int,
    second: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rounds, nodes = value_ZM.shape
    gain_Z, width_Z = torch.empty_like(token_ns_Z), torch.empty_like(token_ns_Z)
    wrap_triton(_offer_kernel)[(rounds,)](
        value_ZM, code_M, token_ns_Z, verify_ns_ZR, offer_ns_ZO, gain_Z, width_Z,
        nodes, verify_ns_ZR.shape[1], offer_ns_ZO.shape[1],
        MIN_WIDTH=min_width, WIDTH=width, FIRST=first, SECOND=second, PATH=_PATH,
        BLOCK=_block(nodes),
    )  # fmt: skip
    return gain_Z, width_Z


@torch.library.triton_op("eagle4::choose_nodes", mutates_args=())
def _choose_nodes(
    survival_ZBP: torch.Tensor, token_ns_Z: torch.Tensor, verify_ns_ZR: torch.Tensor, max_nodes: int
) -> torch.Tensor:
    rounds, batch, nodes = survival_ZBP.shape
    chosen = torch.empty(survival_ZBP.shape, dtype=torch.int8, device=survival_ZBP.device)
    rows, columns = power_of_2(batch), max(power_of_2(nodes), 2)
    _block(rows * columns)
    wrap_triton(_choose_kernel)[(rounds,)](
        survival_ZBP, token_ns_Z, verify_ns_ZR, chosen, batch, nodes, verify_ns_ZR.shape[1],
        MAX_NODES=min(max_nodes, nodes), BATCH=rows, NODES=columns,
        num_warps=min(max(rows * columns // 256, 4), 16),
    )  # fmt: skip
    return chosen.bool()


def best_offer(
    drafted_ZM: torch.Tensor,
    child_ZBKJ: torch.Tensor,
    path_ZBH: torch.Tensor,
    token_ns_Z: torch.Tensor,
    verify_ns_ZR: torch.Tensor,
    offer_ns_ZO: torch.Tensor,
    min_width: int,
    horizons: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ops.next_level.best_offer`; at most two horizons."""
    rounds, batch, width, ranks = child_ZBKJ.shape
    device, lines = child_ZBKJ.device, path_ZBH.shape[2]
    value_ZM = torch.cat([drafted_ZM, child_ZBKJ.flatten(1), path_ZBH.flatten(1)], dim=1)
    level_H = torch.arange(2, lines + 2, dtype=torch.int32, device=device)
    node_K = torch.arange(width, dtype=torch.int32, device=device)
    code_M = torch.cat(
        [
            torch.full((drafted_ZM.shape[1],), -1, dtype=torch.int32, device=device),
            node_K.repeat_interleave(ranks).repeat(batch),
            (_PATH + level_H).repeat(batch),
        ]
    )
    first, second = (*horizons, 0, 0)[:2]
    return _best_offer(
        *(value_ZM, code_M, token_ns_Z.contiguous(), verify_ns_ZR.contiguous()),
        *(offer_ns_ZO.contiguous(), min_width, width, first, second),
    )


def choose_nodes(
    survival_ZBP: torch.Tensor,
    token_ns_Z: torch.Tensor,
    verify_ns_ZR: torch.Tensor,
    max_nodes: int,
) -> torch.Tensor:
    """As `ops.next_level.choose_nodes`."""
    tensors = (survival_ZBP, token_ns_Z, verify_ns_ZR)
    return _choose_nodes(*(tensor.contiguous() for tensor in tensors), max_nodes=max_nodes)


def _block(nodes: int) -> int:
    if nodes > MOST_BLOCK:
        raise ValueError(f"{nodes} nodes do not fit into one program; at most {MOST_BLOCK} do")
    return max(power_of_2(nodes), 2)
