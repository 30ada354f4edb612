"""The drafted nodes of one round as the harness sees them: lists, one per sequence.

Columns are those of the engine's pool: level by level, the children of every expanded node side by
side, best child first. Survival is 0 where a node may not be verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import policy
from .acceptance import Book, Experience
from .fixed_point import ONE, multiply
from .policy import Decision, Prices, acceptances

TAUGHT = 32  # sequences of a round that calibration learns from


class DraftRecord(NamedTuple):
    """What a device that decided alone tells afterwards, of the first `TAUGHT` sequences."""

    limits: Sequence[int]
    levels: list[tuple[list[list[int]], list[list[int]]]]  # of each: `Nodes.add_level`'s arguments
    decisions: list[Decision]
    tokens: list[list[int]]  # of all nodes
    chosen: list[list[int]]
    num_chosen: int  # of all sequences
    promised_q30: int  # of all sequences


class Nodes:
    """Parents, draft probabilities and survivals; ``limits``: deepest useful depth per sequence."""

    def __init__(self, limits: Sequence[int], book: Book):
        self.limits = limits
        self.book = book
        batch = len(limits)
        self.parent: list[list[int]] = [[] for _ in range(batch)]
        self.prob: list[list[int]] = [[] for _ in range(batch)]
        self.survival: list[list[int]] = [[] for _ in range(batch)]
        self.depth_of: list[int] = []  # per column
        self.first_child: list[dict[int, int]] = [{} for _ in range(batch)]
        # Of the last level: draft probability of an expanded node, acceptances of its children.
        self._expanded: list[list[tuple[int, list[int]]]] = []
        self.top_k = 0
        self.depth = 0

    def add_level(self, frontier: Sequence[Sequence[int]], probs: Sequence[Sequence[int]]) -> None:
        """The children of ``frontier`` (pool indices, -1 is the root): ``[B][w]``, ``[B][w k]``."""
        self.depth += 1
        first, width = len(self.depth_of), len(frontier[0])
        self.top_k = len(probs[0]) // width
        self.depth_of += [self.depth] * len(probs[0])
        self._expanded = []
        for b, row in enumerate(frontier):
            allowed = self.depth <= self.limits[b]
            accepted = acceptances(probs[b], self.depth, self.book)
            expanded = []
            for k, node in enumerate(row):
                children = accepted[k * self.top_k : (k + 1) * self.top_k]
                parent = (ONE if node < 0 else self.survival[b][node]) if allowed else 0
                expanded.append((0 if node < 0 else self.prob[b][node], children))
                self.first_child[b][node] = first + k * self.top_k
                self.parent[b] += [node] * self.top_k
                self.survival[b] += [multiply(parent, chance) for chance in children]
            self.prob[b] += probs[b]
            self._expanded.append(expanded)

    def next_level(
        self,
        frontier: Sequence[Sequence[int]],
        max_depth: int,
        is_tree: bool,
        prices: Prices,
    ) -> Decision:
        """What the policy says to another level; ``is_tree``: it must be as wide as it can be."""
        survival = [[self.survival[b][i] for i in row] for b, row in enumerate(frontier)]
        probs = [[self.prob[b][i] for i in row] for b, row in enumerate(frontier)]
        narrowest = len(frontier[0]) if is_tree else 1
        shape = (self.depth, max_depth, narrowest, self.top_k)
        return policy.next_level(self.survival, survival, probs, *shape, self.book, prices)

    def choose(self, prices: Prices) -> list[list[int]]:
        """The nodes to verify."""
        return policy.choose(self.survival, prices)

    def promised(self, chosen: Sequence[Sequence[int]]) -> int:
        """Expected accepted nodes of a verified set, in 2^-30."""
        return sum(self.survival[b][i] for b, row in enumerate(chosen) for i in row)

    def fits(
        self,
        chosen: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        committed: Sequence[Sequence[int]],
    ) -> list[tuple[int, bool]]:
        """What `Regime.record` wants to know of every sequence that verified nodes here."""
        found = []
        for b, row in enumerate(chosen[: len(self.limits)]):
            first = [i for i in row if self.parent[b][i] < 0]
            if first and committed[b]:
                hit = committed[b][0] in (tokens[b][i] for i in first)
                found.append((sum(self.survival[b][i] for i in first), hit))
        return found

    def forecast_into(self, experience: Experience, most: int = 64) -> None:
        """Tell the forecast what the last level turned out to be."""
        level = [(*node, k == 0) for row in self._expanded for k, node in enumerate(row)]
        for node in level[:most]:
            experience.forecast.observe(self.depth - 1, *node)

    def for_report(self) -> Nodes:
        """All of it."""
        return self

    def learn(
        self,
        b: int,
        tokens: Sequence[int],
        committed: Sequence[int],
        experience: Experience,
        request_class: str,
    ) -> None:
        """Walk what was committed through the drafted tokens and count who was right.

        Children are counted only where their parent was accepted. What the target chose says of
        every drafted child whether it was wanted, verified or not.
        """
        node, depth = -1, 0
        for token in committed:
            first = self.first_child[b].get(node)
            if first is None:
                return
            depth += 1
            hit = None
            for child in range(first, first + self.top_k):
                right = hit is None and tokens[child] == token
                experience.observe(self.prob[b][child], depth, right, request_class)
                hit = child if right else hit
            if hit is None:
                return
            node = hit
