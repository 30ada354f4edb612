"""Drafting under the harness: it is asked after every level how wide the next one is, and finally
which nodes are verified.

The parts are those of `drafting`; only the shape differs from round to round. The host looks at
every level's probabilities and frontier, which is cheapest for eager rounds on a CPU; elsewhere
`on_device.DeviceDraft` decides the same in tensor code.
"""

from __future__ import annotations

import time

import torch

from .. import tree as trees
from ..harness import HarnessPolicy
from ..harness.device_policy import quantise
from ..types import Candidates, Plan, Tree
from .drafting import EagleDraft, begin, expand
from .state import Sequence, State
from .stats import SpeculationStats


class AdaptiveDraft(EagleDraft):
    """Drafts with an `Eagle4Drafter` as far as a `HarnessPolicy` wants."""

    policy: HarnessPolicy

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
        top_k = min(plan.top_k, self.drafter.num_proposable)
        pending = sum(sequence.num_pending for sequence in sequences)
        setting = state, sequences, self.drafter
        growth, level, candidates = begin(*setting, plan.max_depth, top_k, stats)
        probs = _probabilities(candidates, batch)
        policy.timed("root", pending, lap.ns())
        policy.begin_draft(depth_limit, probs)
        frontier = growth.frontier_BK.tolist()
        while width := policy.next_width(frontier, plan):
            growth = trees.narrow(growth, width)
            growth, level, candidates = expand(*setting, growth, level, top_k, stats)
            probs = _probabilities(candidates, batch)
            expanded = [row[:width] for row in frontier]
            frontier = growth.frontier_BK.tolist()
            policy.add_level(expanded, probs)
            # The policy's own time is part of a level's cost.
            policy.timed("level", batch * width, lap.ns())
        tree = take(growth.pool, policy.choose(growth.pool.token_BN.tolist(), plan))
        stats.nodes_drafted += int(growth.pool.count_B.sum())
        policy.timed("finish", batch, lap.ns())
        return tree


def take(pool: Tree, chosen: list[list[int]]) -> Tree:
    """The chosen nodes of every sequence (closed under ancestors) as a tree."""
    most = max(map(len, chosen))
    wanted_BN = torch.zeros(pool.token_BN.shape, dtype=torch.bool)
    for b, nodes in enumerate(chosen):
        wanted_BN[b, nodes] = True
    return trees.take(pool, wanted_BN.to(pool.score_BN.device), most)


class Lap:
    """Nanoseconds since the last lap."""

    def __init__(self):
        self._last = time.perf_counter_ns()

    def ns(self) -> int:
        now = time.perf_counter_ns()
        last, self._last = self._last, now
        return now - last


def _probabilities(candidates: Candidates, batch: int) -> list[list[int]]:
    """Draft probabilities of every sequence's new nodes, in 2^-30."""
    return quantise(candidates.logp_RK).view(batch, -1).tolist()
