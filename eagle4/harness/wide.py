"""The policy for many sequences on the host: lists in, tensor code inside, lists out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import device_policy
from .acceptance import Book
from .device_policy import DevicePrices
from .policy import Decision, Pool, Prices


def next_level_wide(
    pool: Pool,
    frontier: Sequence[Sequence[int]],
    probs: Sequence[Sequence[int]],
    depth: int,
    max_depth: int,
    min_width: int,
    top_k: int,
    book: Book,
    prices: Prices,
) -> Decision:
    """As `policy.next_level`."""
    if depth >= max_depth:
        return Decision(False, 0, 0)
    found = device_policy.next_level(
        *(torch.tensor([table]) for table in (pool, frontier, probs)),
        depth,
        max_depth,
        min_width,
        top_k,
        prices.max_nodes,
        device_policy.device_book(book),
        _as_tensors(prices),
    )
    return Decision(bool(found.go_Z), int(found.width_Z), int(found.gain_ns_Z))


def choose_wide(pool: Pool, prices: Prices) -> list[list[int]]:
    """As `policy.choose`."""
    chosen_BP = device_policy.choose(torch.tensor([pool]), prices.max_nodes, _as_tensors(prices))[0]
    found: list[list[int]] = [[] for _ in pool]
    for b, i in chosen_BP.nonzero().tolist():
        found[b].append(i)
    return found


def _as_tensors(prices: Prices) -> DevicePrices:
    return DevicePrices(
        torch.tensor([prices.token_ns]),
        torch.tensor([prices.verify_ns]),
        torch.tensor([prices.level_ns]),
    )
