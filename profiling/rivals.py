"""Policies in `profiling.world`: the harness, plain, fixed shapes, a tuned threshold, the optimum.

Every runner returns tokens and nanoseconds, so tokens per second is their quotient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from eagle4.config import SpeculativeConfig
from eagle4.harness import HarnessPolicy
from eagle4.harness.fixed_point import ONE
from eagle4.types import Load

from .world import Costs, Draft, Process


class Tally(NamedTuple):
    """What a run came to."""

    tokens: int
    ns: int
    draft_forwards: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.ns * 1e9

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Tally(0, 0)


class HarnessRun:
    """A `HarnessPolicy` at work; ``slow`` multiplies what the drafter really takes."""

    def __init__(self, policy: HarnessPolicy, costs: Costs, batch: int, seed: int = 0):
        self.policy, self.costs, self.batch = policy, costs, batch
        self.rng = np.random.default_rng(seed)
        self.pending = batch
        self.slow = 1.0

    def rounds(self, process: Process, count: int) -> Tally:
        """Run that many rounds."""
        total = NOTHING
        for _ in range(count):
            total += self.round(process)
        return total

    def round(self, process: Process) -> Tally:
        policy, costs, batch = self.policy, self.costs, self.batch
        plan = policy.plan(Load(batch, 1, self.pending, 1 << 20))
        if not plan.speculative:
            self.pending += batch
            plain = costs.verify(batch)
            policy.observe([[0]] * batch, {"verify": plain})
            return Tally(batch, plain)
        draft = Draft(process, batch, self.rng)
        ns = self._timed("root", self.pending)
        policy.begin_draft([1 << 20] * batch, quantised(draft.prob_BC))
        frontier, forwards = draft.frontier(plan.top_k), 1
        while width := policy.next_width(frontier.tolist(), plan):
            draft.grow(frontier[:, :width])
            policy.add_level(frontier[:, :width].tolist(), quantised(draft.prob_BC))
            frontier, forwards = draft.frontier(plan.top_k), forwards + 1
            ns += self._timed("level", batch * width)
        chosen = policy.choose(draft.tokens().tolist(), plan)
        mask = np.zeros_like(draft.true_BP)
        for b, nodes in enumerate(chosen):
            mask[b, nodes] = True
        tokens = draft.committed(mask)
        ns += self._timed("finish", batch)
        verify = costs.verify(batch + int(mask.sum()))
        policy.observe(tokens, {"verify": verify})
        count = sum(map(len, tokens))
        self.pending = count
        return Tally(count, ns + verify, forwards)

    def _timed(self, kind: str, rows: int) -> int:
        if kind == "finish":
            ns = int(self.costs.fixed_ns)
        else:
            ns = int(self.costs.level(rows) * self.slow)
        self.policy.timed(kind, rows, ns)
        return ns


def harness(
    process: Process, costs: Costs, batch: int, rounds: int, seed: int = 0, **limits
) -> Tally:
    """The harness from scratch, learning included."""
    policy = HarnessPolicy(SpeculativeConfig(**limits), costs.table())
    return HarnessRun(policy, costs, batch, seed).rounds(process, rounds)


def plain(costs: Costs, batch: int) -> Tally:
    """Never drafts."""
    return Tally(batch, costs.verify(batch))


def fixed(
    process: Process,
    costs: Costs,
    batch: int,
    rounds: int,
    shape: tuple[int, int, int],
    seed: int = 0,
) -> Tally:
    """``(depth, width, nodes)``: always the best ``nodes`` by draft probability."""
    depth, width, nodes = shape
    rng, total = np.random.default_rng(seed), NOTHING
    pending = batch
    for _ in range(rounds):
        draft = Draft(process, batch, rng)
        ns = costs.level(pending) + int(costs.fixed_ns)
        for _ in range(depth - 1):
            draft.grow(draft.frontier(width))
            ns += costs.level(batch * width)
        total, pending = _verify(draft, best_mask(draft.score_BP, nodes), ns, costs, total)
    return total


def threshold(
    process: Process,
    costs: Costs,
    batch: int,
    rounds: int,
    ratio: float,
    seed: int = 0,
    width: int = 2,
    max_depth: int = 12,
) -> Tally:
    """Gain/cost threshold: another level while gain / cost exceeds ``ratio``.

    Gain: the frontier's summed path probability; cost in plain steps. Nodes are verified while
    their path probability over their marginal verification cost exceeds the same ratio.
    """
    rng, total, pending = np.random.default_rng(seed), NOTHING, batch
    step = costs.verify(batch)
    for _ in range(rounds):
        draft = Draft(process, batch, rng)
        ns = costs.level(pending) + int(costs.fixed_ns)
        while draft.depth < max_depth:
            frontier = draft.frontier(width)
            gain = np.exp(np.take_along_axis(draft.score_BP, frontier, 1)).sum()
            if gain * step < ratio * batch * costs.level(batch * width):
                break
            draft.grow(frontier)
            ns += costs.level(batch * width)
        survival = np.exp(draft.score_BP)
        order = np.argsort(-survival.ravel(), kind="stable")[: 16 * batch]
        marginal = np.diff([costs.verify(batch + n) for n in range(len(order) + 1)])
        keep = survival.ravel()[order] * step > ratio * batch * marginal
        count = int(keep.argmin()) if not keep.all() else len(order)
        mask = np.zeros(survival.size, dtype=bool)
        mask[order[:count]] = True
        total, pending = _verify(draft, mask.reshape(survival.shape), ns, costs, total)
    return total


def tuned(runs: Iterable[Tally]) -> Tally:
    """The fastest of several runs."""
    return max(runs, key=lambda tally: tally.rate)


def best_mask(score_BP: np.ndarray, nodes: int) -> np.ndarray:
    """The best nodes of every sequence."""
    order = np.argsort(-score_BP, axis=1, kind="stable")[:, :nodes]
    mask = np.zeros(score_BP.shape, dtype=bool)
    np.put_along_axis(mask, order, True, 1)
    return mask


def quantised(prob_BC: np.ndarray) -> list[list[int]]:
    """Probabilities in 2^-30."""
    return (prob_BC * ONE).astype(np.int64).tolist()


def _verify(
    draft: Draft, mask: np.ndarray, ns: int, costs: Costs, total: Tally
) -> tuple[Tally, int]:
    batch = len(mask)
    tokens = sum(map(len, draft.committed(mask)))
    ns += costs.verify(batch + int(mask.sum()))
    return total + Tally(tokens, ns, draft.depth), tokens
