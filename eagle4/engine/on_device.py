"""Drafting with the harness on the device: levels, decisions and the final choice are tensor code.

The host reads one small tensor per level (how wide the next one is; it launches that width) and one
at the end (what is verified, and what there is to learn from). It never sees a score in between.
`adaptive.AdaptiveDraft` is the readable twin, which must draft the same trees.
"""

from __future__ import annotations

import torch

from ..cache import Scratch, make_scratch
from ..drafter import DraftOutput, Eagle4Drafter
from ..harness import HarnessPolicy, Policy
from ..harness.acceptance import Book
from ..harness.device_policy import DeviceBook, device_book
from ..harness.nodes import TAUGHT, DraftRecord
from ..harness.policy import Decision
from ..types import Plan, Tree
from . import level as levels
from .adaptive import Lap
from .canvas import Canvas, Finished, Terms, TreeLimits
from .drafter_rows import DraftError, draft_pools, propose
from .drafting import EagleDraft, catch_up
from .graphs import Opened
from .level import NOT_FINITE
from .state import Sequence, State
from .stats import SpeculationStats


class DeviceDraft(EagleDraft):
    """Drafts with an `Eagle4Drafter` as far as a `HarnessPolicy` wants, decided on the device."""

    policy: HarnessPolicy

    def __init__(self, drafter: Eagle4Drafter, policy: Policy):
        super().__init__(drafter, policy)
        self.limits: TreeLimits = TreeLimits.of(self.policy.config, drafter)
        self._book: tuple[Book, DeviceBook] | None = None

    def __call__(
        self,
        state: State,
        sequences: list[Sequence],
        plan: Plan,
        depth_limit: list[int],
        stats: SpeculationStats,
    ) -> Tree:
        """Raises `DraftError` on non-finite probabilities."""
        policy, batch, lap = self.policy, len(sequences), Lap()
        pending = sum(sequence.num_pending for sequence in sequences)
        limits = self.limits
        prices = policy.price(limits.top_k)
        book = self._device_book(state.device)
        terms = Terms.of(depth_limit, limits.max_depth, prices, book)
        state.reserve_scratch(sequences, limits.entries)
        root = catch_up(state, sequences, self.drafter, stats)
        canvas, decision = self._open(state, sequences, root, terms)
        decisions = [_decided(stats, decision)]
        policy.timed("root", pending, lap.ns())
        place = draft_pools(state, self.drafter), scratch_of(state, sequences, limits)
        while width := decisions[-1].width:
            depth = len(decisions) + 1
            canvas, decision = self._level(state, sequences, canvas, *place, terms, width, depth)
            stats.draft_calls += 1
            decisions.append(_decided(stats, decision))
            policy.timed("level", batch * width, lap.ns())
        finished = state.graphs.trees(limits).finish(canvas, terms, limits)
        policy.drafted(_told(stats, canvas, finished, decisions, depth_limit, limits.top_k), prices)
        stats.nodes_drafted += batch * limits.top_k * (1 + sum(d.width for d in decisions))
        policy.timed("finish", batch, lap.ns())
        return finished.tree

    def _device_book(self, device: torch.device) -> DeviceBook:
        """The policy's book there, copied when it is a new one."""
        book = self.policy.book
        if self._book is None or self._book[0] is not book:
            self._book = book, device_book(book, device)
        return self._book[1]

    def _open(
        self, state: State, sequences: list[Sequence], root: DraftOutput, terms: Terms
    ) -> Opened:
        limits = self.limits
        if state.sampler is None:
            return state.graphs.trees(limits).open_tree(self.drafter, root, terms, limits)
        candidates = propose(state, sequences, self.drafter, root.head_RH, 1, limits.top_k)
        return levels.start(root, candidates, terms, limits)

    def _level(
        self,
        state: State,
        sequences: list[Sequence],
        canvas: Canvas,
        pools: tuple[torch.Tensor, torch.Tensor],
        scratch: Scratch,
        terms: Terms,
        width: int,
        depth: int,
    ) -> Opened:
        """Level ``depth``; with shared noise the candidates are ranked between its parts."""
        limits, drafter, graphs = self.limits, self.drafter, state.graphs
        if state.sampler is None:
            run = graphs.trees(limits).level
            return run(drafter, canvas, pools, scratch, terms, limits, width)
        place = pools, scratch, width
        canvas, rows, out = levels.expand(graphs.draft, drafter, canvas, *place)
        candidates = propose(state, sequences, drafter, out.head_RH, depth, limits.top_k)
        return levels.extend(canvas, rows, out, candidates, terms, limits)


def scratch_of(state: State, sequences: list[Sequence], limits: TreeLimits) -> Scratch:
    """Where a round's drafted rows go."""
    owners = [(sequence.index, sequence.draft_length) for sequence in sequences]
    graphs = state.graphs
    setting = {"gathers": graphs.compiled, "bucketed": graphs.replays is not None}
    return make_scratch(state.table, owners, limits.entries, state.device, **setting)


def _decided(stats: SpeculationStats, decision: torch.Tensor) -> Decision:
    width, gain_ns = stats.read("width", decision)
    if width == NOT_FINITE:
        raise DraftError("the drafter's probabilities are not finite")
    return Decision(width > 0, width, gain_ns)


def _told(
    stats: SpeculationStats,
    canvas: Canvas,
    finished: Finished,
    decisions: list[Decision],
    limits: list[int],
    top_k: int,
) -> DraftRecord:
    """Read a finished draft."""
    sizes = [top_k, *(decision.width * top_k for decision in decisions[:-1])]
    used, taught = sum(sizes), min(TAUGHT, len(limits))
    pool = canvas.pool
    columns = pool.token_BN, pool.parent_BN, canvas.prob_BP, finished.chosen_BP
    nodes = torch.stack([column[:taught, :used].long() for column in columns])
    totals = torch.stack([finished.tree.count_B.sum(), finished.promised])
    *flat, num_chosen, promised = stats.read("tree", torch.cat([nodes.flatten(), totals]))
    rows = [flat[start : start + used] for start in range(0, len(flat), used)]
    token, parent, prob, mask = (rows[i * taught : (i + 1) * taught] for i in range(4))
    found, first = [], 0
    for size in sizes:
        stop = first + size
        parents = [row[first:stop:top_k] for row in parent]
        found.append((parents, [row[first:stop] for row in prob]))
        first = stop
    chosen = [[i for i, kept in enumerate(row) if kept] for row in mask]
    return DraftRecord(limits[:taught], found, decisions, token, chosen, num_chosen, promised)
