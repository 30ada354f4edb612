"""`harness.policy` in tensor code: int64 only, static shapes, no synchronisation, no host read.

It may run inside a compiled or captured depth level; outputs stay in device memory. A leading ``Z``
counts independent rounds (1 in use; many in tests). Every result equals the reference bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import best_offer, choose_nodes
from ..ops.next_level import FORBIDDEN
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
    parent_ZBK: torch.Tensor, prob_ZBKJ: torch.Tensor, depth: torch.Tensor, book: DeviceBook
) -> torch.Tensor:
    """Survivals ``[Z, B, K, J]`` of children at ``depth`` (int64, 0-d)."""
    curve_K = _row(book.accept_DK, depth.clamp_max(DEPTHS) - 1)
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
    depth: torch.Tensor,
    max_depth: torch.Tensor,
    min_width: int,
    top_k: int,
    max_nodes: int,
    book: DeviceBook,
    prices: DevicePrices,
    impl: str = "auto",
) -> DeviceDecision:
    """Twin of `policy.next_level`; widths and counts are static, depths int64 scalars (0-d).

    ``impl="triton"`` sorts and prices in a kernel (at most `ops.next_level.MOST_BLOCK` nodes).
    """
    drafted_ZM = pool_ZBP.topk(min(max_nodes, pool_ZBP.shape[2]), dim=2).values.flatten(1)
    forecast_CR = _row(book.forecast_DCR, depth.clamp_max(DEPTHS))
    expected = forecast_CR[_cell(prob_ZBK, book)][..., :top_k]
    child_ZBKJ = (frontier_ZBK.unsqueeze(-1) * expected) >> BITS
    path_ZBH = _path(child_ZBKJ[:, :, 0, 0], depth, book)
    offer_ns_ZO = _offers(prices.level_ns_ZW, frontier_ZBK.shape[2], min_width, max_depth - depth)
    gain_Z, width_Z = best_offer(
        *(drafted_ZM, child_ZBKJ, path_ZBH, prices.token_ns_Z, prices.verify_ns_ZR, offer_ns_ZO),
        *(min_width, HORIZONS, impl),
    )
    return DeviceDecision(gain_Z > 0, width_Z, gain_Z)


def choose(
    pool_ZBP: torch.Tensor, max_nodes: int, prices: DevicePrices, impl: str = "auto"
) -> torch.Tensor:
    """Twin of `policy.choose`: bool ``[Z, B, P]``."""
    return choose_nodes(pool_ZBP, prices.token_ns_Z, prices.verify_ns_ZR, max_nodes, impl)


def _cell(prob: torch.Tensor, book: DeviceBook) -> torch.Tensor:
    place = torch.searchsorted(book.knots_K, prob.contiguous(), right=True) - 1
    return place.clamp(0, CELLS - 1)


def _row(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``table[index]`` without reading the index on the host."""
    return table.index_select(0, index.reshape(1)).squeeze(0)


def _offers(
    level_ns_ZW: torch.Tensor, width: int, min_width: int, levels_left: torch.Tensor
) -> torch.Tensor:
    """What the levels of every offer cost, ``[Z, O]``; too deep ones are forbidden."""
    costs = [level_ns_ZW[:, min_width : width + 1]]
    costs += [levels * level_ns_ZW[:, min_width, None] for levels in HORIZONS]
    cost_ZO = torch.cat(costs, dim=1)
    place_O = torch.arange(cost_ZO.shape[1], device=cost_ZO.device)
    levels_O = torch.ones_like(place_O)
    for i, levels in enumerate(reversed(HORIZONS), start=1):
        levels_O = torch.where(place_O == cost_ZO.shape[1] - i, levels, levels_O)
    return torch.where(levels_O <= levels_left, cost_ZO, FORBIDDEN)


def _path(best_ZB: torch.Tensor, depth: torch.Tensor, book: DeviceBook) -> torch.Tensor:
    """Survivals ``[Z, B, max(HORIZONS) - 1]`` along the best child's line, below the child."""
    nodes, last_ZB = [], best_ZB
    for below in range(2, max(HORIZONS) + 1):
        chain = _row(book.chain_D, (depth + below).clamp_max(book.chain_D.shape[0] - 1))
        last_ZB = (last_ZB * chain) >> BITS
        nodes.append(last_ZB.unsqueeze(-1))
    return torch.cat(nodes, dim=-1)
