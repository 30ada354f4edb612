"""`harness.policy` in tensor code: int64 only, static shapes, no synchronisation, no host read.

It may run inside a compiled or captured depth level; outputs stay in device memory. A leading ``Z``
counts independent rounds (1 in use; many in tests). Every result equals the reference bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import best_worth, choose_nodes
from .acceptance import Book
from .fixed_point import BITS, CELLS, DEPTHS, KNOTS, ONE
from .policy import HORIZONS


class DeviceBook(NamedTuple):
    """`acceptance.Book` as int64 tensors."""

    knots_K: torch.Tensor
    accept_DK: torch.Tensor
    forecast_DCR: torch.Tensor
    chain_D: torch.Tensor


class DevicePrices(NamedTuple):
    """`policy.Prices` of Z rounds as int64 tensors."""

    token_ns_Z: torch.Tensor
    verify_ns_ZR: torch.Tensor
    level_ns_ZW: torch.Tensor


class DeviceDecision(NamedTuple):
    """`policy.Decision` in device memory."""

    go_Z: torch.Tensor  # bool
    width_Z: torch.Tensor  # int64, 0 where go is False
    gain_ns_Z: torch.Tensor  # int64


def device_book(book: Book, device: torch.device | str = "cpu") -> DeviceBook:
    """Copy a book to a device."""
    parts = (KNOTS, book.accept, book.forecast, book.chain)
    return DeviceBook(*(torch.tensor(part, dtype=torch.int64, device=device) for part in parts))


def quantise(logp: torch.Tensor) -> torch.Tensor:
    """Log-probabilities as int64 in 2^-30."""
    return (logp.float().exp() * ONE).to(torch.int64).clamp(0, ONE)


def survivals(
    parent_ZBK: torch.Tensor, prob_ZBKJ: torch.Tensor, depth: int, book: DeviceBook
) -> torch.Tensor:
    """Survivals ``[Z, B, K, J]`` of children at ``depth``."""
    curve_K = book.accept_DK[min(depth, DEPTHS) - 1]
    cell = _cell(prob_ZBKJ, book)
    start, end = book.knots_K[cell], book.knots_K[cell + 1]
    low, high = curve_K[cell], curve_K[cell + 1]
    inside = (prob_ZBKJ - start).clamp_min(0).minimum(end - start)
    rise = torch.div((high - low) * inside, end - start, rounding_mode="floor")
    return (parent_ZBK.unsqueeze(-1) * (low + rise)) >> BITS


def next_level(
    pool_ZBP: torch.Tensor,
    frontier_ZBK: torch.Tensor,
    prob_ZBK: torch.Tensor,
    depth: int,
    max_depth: int,
    min_width: int,
    top_k: int,
    max_nodes: int,
    book: DeviceBook,
    prices: DevicePrices,
) -> DeviceDecision:
    """Twin of `policy.next_level`; depths, widths and counts are static."""
    rounds, batch, width = frontier_ZBK.shape
    zero_Z = torch.zeros_like(prices.token_ns_Z)
    if depth >= max_depth:
        return DeviceDecision(zero_Z.bool(), zero_Z, zero_Z)
    drafted_ZM = pool_ZBP.topk(min(max_nodes, pool_ZBP.shape[2]), dim=2).values.flatten(1)
    now_Z = best_worth(drafted_ZM, prices.token_ns_Z, prices.verify_ns_ZR)
    expected = book.forecast_DCR[min(depth, DEPTHS)][_cell(prob_ZBK, book)][..., :top_k]
    child_ZBKJ = (frontier_ZBK.unsqueeze(-1) * expected) >> BITS
    best_Z, width_Z = zero_Z, zero_Z

    offers = [(w, 1, child_ZBKJ[:, :, :w].flatten(1)) for w in range(min_width, width + 1)]
    for horizon in HORIZONS:
        if depth + horizon <= max_depth:
            offers.append((min_width, horizon, _path(child_ZBKJ[:, :, 0], depth, horizon, book)))
    for offered, levels, added_ZM in offers:
        both_ZM = torch.cat([drafted_ZM, added_ZM], dim=1)
        gain_Z = best_worth(both_ZM, prices.token_ns_Z, prices.verify_ns_ZR) - now_Z
        gain_Z = gain_Z - levels * prices.level_ns_ZW[:, offered]
        is_better_Z = gain_Z > best_Z
        best_Z = torch.where(is_better_Z, gain_Z, best_Z)
        width_Z = torch.where(is_better_Z, offered, width_Z)
    return DeviceDecision(best_Z > 0, width_Z, best_Z)


def choose(pool_ZBP: torch.Tensor, max_nodes: int, prices: DevicePrices) -> torch.Tensor:
    """Twin of `policy.choose`: bool ``[Z, B, P]``."""
    return choose_nodes(pool_ZBP, prices.token_ns_Z, prices.verify_ns_ZR, max_nodes)


def _cell(prob: torch.Tensor, book: DeviceBook) -> torch.Tensor:
    place = torch.searchsorted(book.knots_K, prob.contiguous(), right=True) - 1
    return place.clamp(0, CELLS - 1)


def _path(child_ZBJ: torch.Tensor, depth: int, horizon: int, book: DeviceBook) -> torch.Tensor:
    last_ZB = child_ZBJ[..., 0]
    nodes = [child_ZBJ]
    for below in range(depth + 2, depth + horizon + 1):
        last_ZB = (last_ZB * book.chain_D[min(below, len(book.chain_D) - 1)]) >> BITS
        nodes.append(last_ZB.unsqueeze(-1))
    return torch.cat(nodes, dim=-1).flatten(1)
