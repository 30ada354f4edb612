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
        self.remaining = 1 << 20
        self.slow = 1.0

    def rounds(self, process: Process, count: int) -> Tally:
        """Run that many rounds."""
        total = NOTHING
        for _ in range(count):
            total += self.round(process)
        return total

    def round(self, process: Process) -> Tally:
        policy, costs, batch = self.policy, self.costs, self.batch
        plan = policy.plan(Load(batch, 1, self.pending, self.remaining))
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
    """``(depth, width, nodes)``: always the best ``nodes`` by draft probability.

    All rounds are drawn at once; none depends on another.
    """
    depth, width, nodes = shape
    draft = Draft(process, rounds * batch, np.random.default_rng(seed))
    for _ in range(depth - 1):
        draft.grow(draft.frontier(width))
    mask = best_mask(draft.score_BP, nodes)
    tokens = sum(map(len, draft.committed(mask)))
    ns = costs.level(round(tokens / rounds)) + int(costs.fixed_ns)
    ns += (depth - 1) * costs.level(batch * width) + costs.verify(batch + int(mask[:batch].sum()))
    return Tally(tokens, rounds * ns, rounds * depth)


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
    their path probability over their marginal verification cost exceeds the same ratio. All rounds
    are drawn at once: what a round does not draft is masked.
    """
    draft = Draft(process, rounds * batch, np.random.default_rng(seed))
    step, forwards = costs.verify(batch), rounds
    live, level_ns = np.ones(rounds, dtype=bool), np.zeros(rounds)
    survival = np.exp(draft.score_BP)
    while draft.depth < max_depth:
        frontier = draft.frontier(width)
        gain = np.take_along_axis(survival, frontier, 1).reshape(rounds, -1).sum(1)
        live &= gain * step >= ratio * batch * costs.level(batch * width)
        if not live.any():
            break
        draft.grow(frontier)
        level_ns += live * costs.level(batch * width)
        forwards += int(live.sum())
        added = np.exp(draft.score_BP[:, survival.shape[1] :]) * np.repeat(live, batch)[:, None]
        survival = np.concatenate([survival, added], 1)
    mask = np.zeros(survival.shape, dtype=bool)
    for z in range(rounds):
        rows = slice(z * batch, (z + 1) * batch)
        flat = survival[rows].ravel()
        order = np.argsort(-flat, kind="stable")[: 16 * batch]
        marginal = np.diff([costs.verify(batch + n) for n in range(len(order) + 1)])
        keep = (flat[order] * step > ratio * batch * marginal) & (flat[order] > 0)
        chosen = np.zeros(flat.size, dtype=bool)
        chosen[order[: int(keep.argmin()) if not keep.all() else len(order)]] = True
        mask[rows] = chosen.reshape(batch, -1)
    tokens = sum(map(len, draft.committed(mask)))
    verify = sum(
        costs.verify(batch + int(mask[z * batch : (z + 1) * batch].sum())) for z in range(rounds)
    )
    root = costs.level(round(tokens / rounds)) + int(costs.fixed_ns)
    return Tally(tokens, rounds * root + int(level_ns.sum()) + verify, forwards)


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
