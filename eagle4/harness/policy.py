"""The policy, to be read: what another level and another verified node are worth.

Renewal-reward view (DESIGN.md section 7): the long-run rate rho = E[tokens] / E[time] is maximal
when every round maximises ``E[tokens] - rho * E[time]``. With ``token_ns = 1 / rho`` that is
``token_ns * E[tokens] - E[ns]``, and every decision is local:

- a node is worth ``token_ns`` times its survival, the product of the calibrated acceptances on its
  path; expected tokens of a verified tree are the sum of its nodes' survivals;
- verify the n best nodes of the batch that maximise worth minus added verification cost;
- draft another level if some width and horizon add more net worth than the levels cost.

All arithmetic is in integers: nanoseconds and 2^-30 probabilities. `device_policy` is the same in
tensor code and must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from .acceptance import Book
from .fixed_point import BITS, DEPTHS, cell, depth_class, interpolate, multiply

HORIZONS = (2, 4)  # levels looked ahead beside one: rows may be free up to the next bucket
Pool = Sequence[Sequence[int]]  # survivals [B][P], 0 where a node must not be verified


class Prices(NamedTuple):
    """What a round's decisions cost and what a token is worth, in nanoseconds."""

    token_ns: int  # at most MOST_NS
    verify_ns: list[int]  # with 0, 1, ... nodes in the batch beside the roots; never decreasing
    level_ns: list[int]  # one more level by frontier width; index 0 is unused
    max_nodes: int  # verified nodes of one sequence at most


class Decision(NamedTuple):
    """Whether another level is drafted and how wide."""

    go: bool
    width: int
    gain_ns: int  # expected worth minus cost of the best choice, against stopping now


def acceptances(probs_q30: Sequence[int], depth: int, book: Book) -> list[int]:
    """Acceptance of nodes at ``depth`` whose parents are accepted; survivals are their products."""
    curve = book.accept[depth_class(depth)]
    return [interpolate(curve, prob) for prob in probs_q30]


def least_worth(prices: Prices) -> int:
    """Survival below which a node never pays: its worth is less than any node's added cost."""
    added = min((b - a for a, b in pairwise(prices.verify_ns)), default=0)
    return -(-(added << BITS) // max(prices.token_ns, 1))


def best_worth(values_q30: Sequence[int], prices: Prices) -> int:
    """Net worth of verifying the best nodes among these, at least 0 (none of them)."""
    token_ns, verify_ns, _, _ = prices
    base, best, total = verify_ns[0], 0, 0
    ordered = sorted(values_q30, reverse=True)
    for cost, value in zip(verify_ns[1:], ordered, strict=False):
        added = value * token_ns >> BITS
        if not added:
            break
        total += added
        if total - (cost - base) > best:
            best = total - (cost - base)
    return best


def next_level(
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
    """Draft level ``depth + 1``?

    ``frontier`` and ``probs`` hold survival and draft probability of the ``[B][K]`` nodes that the
    level could expand, best first. Offers, in order: widths from ``min_width`` for one level, then
    the best node's path for several levels. The first of the best offers wins.
    """
    if depth >= max_depth:
        return Decision(False, 0, 0)
    least = least_worth(prices)
    drafted = [
        s for row in pool for s in sorted(row, reverse=True)[: prices.max_nodes] if s >= least
    ]
    now = best_worth(drafted, prices)
    children = [
        [_children(s, p, depth, top_k, book) for s, p in zip(row, row_probs, strict=True)]
        for row, row_probs in zip(frontier, probs, strict=True)
    ]
    best = Decision(False, 0, 0)
    limits = min_width, len(frontier[0]), depth, max_depth
    for width, levels, added in _offers(children, limits, book):
        worth = best_worth(drafted + [c for c in added if c >= least], prices)
        gain = worth - now - levels * prices.level_ns[width]
        if gain > best.gain_ns:
            best = Decision(True, width, gain)
    return best


def _offers(
    children: Sequence[Sequence[list[int]]], limits: tuple[int, int, int, int], book: Book
) -> Iterator[tuple[int, int, list[int]]]:
    """Width, levels and expected survivals of what could be drafted next, in order."""
    min_width, max_width, depth, max_depth = limits
    for width in range(min_width, max_width + 1):
        yield width, 1, [c for row in children for nodes in row[:width] for c in nodes]
    for horizon in HORIZONS:
        if depth + horizon <= max_depth:
            paths = (_path(row[0], depth, horizon, book) for row in children)
            yield min_width, horizon, [c for path in paths for c in path]


def _children(survival: int, prob: int, depth: int, top_k: int, book: Book) -> list[int]:
    if not survival:
        return [0] * top_k
    expected = book.forecast[min(depth, DEPTHS)][cell(prob)]
    return [multiply(survival, expected[rank]) for rank in range(top_k)]


def _path(children: list[int], depth: int, horizon: int, book: Book) -> list[int]:
    """A node's children, and the best child's line for ``horizon`` levels in all."""
    nodes, last = list(children), children[0]
    for below in range(depth + 2, depth + horizon + 1):
        last = multiply(last, book.chain[min(below, len(book.chain) - 1)])
        nodes.append(last)
    return nodes


def choose(pool: Pool, prices: Prices) -> list[list[int]]:
    """Which nodes every sequence verifies: indices in ascending order.

    Nodes are taken over the whole batch in order of survival, each sequence at most ``max_nodes``;
    ties go to the earlier sequence, then to the earlier node. Survivals never grow along a path and
    parents come first, so the sets are closed under ancestors.
    """
    least = least_worth(prices)
    ordered = sorted(
        (-survival, b, i)
        for b, row in enumerate(pool)
        for survival, i in sorted(
            ((s, i) for i, s in enumerate(row) if s >= least), key=_best_first
        )[: prices.max_nodes]
    )
    token_ns, verify_ns, _, _ = prices
    base, best, total, count = verify_ns[0], 0, 0, 0
    for n, (cost, (loss, _, _)) in enumerate(zip(verify_ns[1:], ordered, strict=False), start=1):
        added = -loss * token_ns >> BITS
        if not added:
            break
        total += added
        if total - (cost - base) > best:
            best, count = total - (cost - base), n
    chosen: list[list[int]] = [[] for _ in pool]
    for _, b, i in ordered[:count]:
        chosen[b].append(i)
    return [sorted(nodes) for nodes in chosen]


def _best_first(node: tuple[int, int]) -> tuple[int, int]:
    return -node[0], node[1]
