"""What speculation promises before anything is drafted: the best static plan on average.

    reach(t) = product of the chain's acceptances up to depth t
    tokens(D, k) = 1 + sum of the k best of {best children, their siblings} down to depth D

per sequence, against root + (D - 1) levels + finish + verify. It starts the regime and the price of
a token, and its optimistic form (nearly everything accepted) says whether speculation can pay here
at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..config import SpeculativeConfig
from ..types import Load
from .acceptance import Book
from .cost import CostTable
from .fixed_point import BITS, ONE, multiply
from .regime import Q

SURE = round(0.97 * ONE)  # acceptance that no drafter beats


class Outlook(NamedTuple):
    """The best static plan."""

    gain: int  # against plain decoding, in 2^-20 plain rounds
    tokens_q10: int  # of the whole batch and round
    cost_ns: int
    depth: int
    nodes: int  # per sequence

    def rounds_left(self, load: Load) -> int:
        """Rounds like this until the load's longest sequence ends."""
        return load.remaining * load.num_sequences * 1024 // max(self.tokens_q10, 1)


class Shape(NamedTuple):
    """What a static plan may use, and at which load."""

    num_sequences: int
    context: int
    max_depth: int
    top_k: int
    max_nodes: int


def expected(table: CostTable, book: Book, shape: Shape) -> Outlook:
    """By what is known about acceptance."""
    chain = [book.chain[min(d, len(book.chain) - 1)] for d in range(shape.max_depth + 1)]
    return _best(table, chain, book.forecast[0][0][1 : shape.top_k], shape)


def of_draws(table: CostTable, acceptance: Sequence[Sequence[float]], shape: Shape) -> Outlook:
    """By the acceptance ``[depth][rank]`` of drawn nodes."""
    chain = [0, *(round(row[0] * ONE) for row in acceptance)]
    siblings = [round(chance * ONE) for chance in acceptance[0][1 : shape.top_k]]
    return _best(table, chain, siblings, shape)


def optimistic(table: CostTable, shape: Shape) -> Outlook:
    """By the acceptance of a nearly perfect drafter."""
    return _best(table, [SURE] * (shape.max_depth + 1), [], shape)


def _best(table: CostTable, chain: list[int], siblings: list[int], shape: Shape) -> Outlook:
    batch, context = shape.num_sequences, shape.context
    plain_ns = table.cost_ns("plain", batch, context)
    verify_ns = table.verify_curve(batch, batch * shape.max_nodes, context)
    fixed_ns = table.cost_ns("root", 2 * batch, context) + table.cost_ns("finish", batch, context)
    level_ns = table.cost_ns("level", batch, context)
    best, reach, nodes = None, ONE, []
    for depth in range(1, shape.max_depth + 1):
        nodes += [multiply(reach, s) for s in siblings]
        reach = multiply(reach, chain[depth])
        nodes = sorted([*nodes, reach], reverse=True)[: shape.max_nodes]
        survival = 0
        for count, node in enumerate(nodes, start=1):
            survival += node
            cost = fixed_ns + (depth - 1) * level_ns + verify_ns[batch * count]
            tokens_q10 = batch * (ONE + survival) >> (BITS - 10)
            gain = (((tokens_q10 * plain_ns // batch) >> 10) - cost << Q) // plain_ns
            # The best rate is the best ratio, not the largest gain of a single round.
            if best is None or tokens_q10 * best.cost_ns > best.tokens_q10 * cost:
                best = Outlook(gain, tokens_q10, cost, depth, count)
    assert best is not None, "max_depth and max_nodes are at least 1"
    return best


class Outlooks:
    """Outlooks of the loads that a call meets, made again when what they rest on has changed."""

    def __init__(self, config: SpeculativeConfig, table: CostTable):
        self._config, self._table = config, table
        self._kept: dict[tuple, tuple[Outlook, Outlook]] = {}

    def of(self, load: Load, book: Book, period: int) -> tuple[Outlook, Outlook]:
        """`expected` and `optimistic`, for a context rounded to 64; ``period``: age of the book."""
        context = (load.context + 32) // 64 * 64
        key = load.num_sequences, context, self._table.version, period
        if key not in self._kept:
            if len(self._kept) > 64:
                self._kept.clear()
            config = self._config
            limits = config.max_depth, config.width, config.max_nodes
            shape = Shape(load.num_sequences, context, *limits)
            self._kept[key] = expected(self._table, book, shape), optimistic(self._table, shape)
        return self._kept[key]
