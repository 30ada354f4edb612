"""Draft one tree per sequence: depth 0 on verified rows, then level by level.

Depth 0 runs on the tokens that the target has just verified, with their true features, so committed
draft KV never comes from guesses. Drafted nodes write behind the committed entries and are simply
overwritten by the next round.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from .. import tree as trees
from ..cache import AttentionStep, Window
from ..drafter import DraftOutput, Eagle4Drafter
from ..harness import Policy
from ..types import Candidates, Drawn, Plan, Tree
from .drafter_rows import check_finite, forward, propose
from .even_rows import pack
from .state import Sequence, State
from .stats import SpeculationStats

CHUNK = 512  # rows of one depth-0 forward


class _Level(NamedTuple):
    """What the last drafter forward left for the frontier, per sequence."""

    state_BKH: torch.Tensor
    visible_BKW: torch.Tensor  # scratch entries that each expanded node sees, itself included
    depth_W: torch.Tensor  # depths of the scratch entries, 0 for children of the root


class Draft(Protocol):
    """Anything that drafts: the engine's own `EagleDraft`, or a script in a test."""

    def __call__(
        self,
        state: State,
        sequences: list[Sequence],
        plan: Plan,
        depth_limit: list[int],
        stats: SpeculationStats,
    ) -> Tree | Drawn:
        """A pruned tree of every sequence, none deeper than its ``depth_limit`` (at least 0)."""
        ...


class EagleDraft:
    """Drafts with an `Eagle4Drafter`, level by level as planned."""

    def __init__(self, drafter: Eagle4Drafter, policy: Policy):
        self.drafter = drafter
        self.policy = policy

    def __call__(
        self,
        state: State,
        sequences: list[Sequence],
        plan: Plan,
        depth_limit: list[int],
        stats: SpeculationStats,
    ) -> Tree | Drawn:
        """Raises `DraftError` on non-finite probabilities."""
        plan = plan._replace(top_k=min(plan.top_k, self.drafter.num_proposable))
        setting = state, sequences, self.drafter
        growth, level, _ = begin(*setting, plan.max_depth, plan.top_k, stats)
        while _wants_level(plan, growth, depth_limit):
            growth, level, _ = expand(*setting, growth, level, plan.top_k, stats)
        stats.nodes_drafted += int(growth.pool.count_B.sum())
        limit_B = torch.tensor(depth_limit, device=state.device)
        return trees.prune(growth.pool, plan.max_nodes, limit_B)


def begin(
    state: State,
    sequences: list[Sequence],
    drafter: Eagle4Drafter,
    max_depth: int,
    top_k: int,
    stats: SpeculationStats,
) -> tuple[trees.Growth, _Level, Candidates]:
    """Depth 0, and the root's children as level 1 of a tree up to ``max_depth`` deep."""
    state.reserve_scratch(sequences, top_k * max_depth)
    root = catch_up(state, sequences, drafter, stats)
    candidates = check_finite(propose(state, sequences, drafter, root.head_RH, 1, top_k))
    return trees.start(candidates, max_depth, top_k), root_level(root, top_k), candidates


def root_level(root: DraftOutput, top_k: int) -> _Level:
    """The root's state for each of its children, nothing drafted yet."""
    batch, device = len(root.state_RH), root.state_RH.device
    return _Level(
        root.state_RH.unsqueeze(1).expand(-1, top_k, -1),
        torch.zeros(batch, top_k, 0, dtype=torch.bool, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )


def _wants_level(plan: Plan, growth: trees.Growth, depth_limit: list[int]) -> bool:
    """As deep as planned; less where another level provably cannot change the verified tree."""
    if growth.depth >= min(plan.max_depth, max(depth_limit)):
        return False
    return not bool(trees.is_saturated(growth, plan.max_nodes).all())


def catch_up(
    state: State, sequences: list[Sequence], drafter: Eagle4Drafter, stats: SpeculationStats
) -> DraftOutput:
    """Depth 0 on all pending features; returns the last row of every sequence."""
    last: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    while any(sequence.num_pending for sequence in sequences):
        windows, tokens, features, owners = [], [], [], []
        budget = CHUNK
        for sequence in sequences:
            if not sequence.num_pending or budget <= 0:
                continue
            taken = sequence.take(budget)
            first, count = sequence.draft_length, len(taken)
            budget -= count
            ids = state.tokens(sequence)
            tokens.append(ids[first + 1 : first + 1 + count])
            features.append(taken)
            position = torch.arange(first, first + count, device=state.device)
            visible = torch.ones(count, count, dtype=torch.bool, device=state.device).tril()
            windows.append(Window(sequence.index, first, 0, position, visible))
            owners.append((sequence, count))
        rows = pack(state, windows, tokens, features)
        token_R, feature_RTH = rows.columns
        step = state.step(rows.windows)
        out = forward(state, drafter, drafter.fuse(feature_RTH), token_R, step, stats)
        for (sequence, count), first in zip(owners, rows.first, strict=True):
            sequence.draft_length += count
            row = first + count - 1
            last[sequence.index] = (out.head_RH[row], out.state_RH[row])
    rows = [last[sequence.index] for sequence in sequences]
    return DraftOutput(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))


def expand(
    state: State,
    sequences: list[Sequence],
    drafter: Eagle4Drafter,
    growth: trees.Growth,
    level: _Level,
    top_k: int,
    stats: SpeculationStats,
) -> tuple[trees.Growth, _Level, Candidates]:
    """Run the drafter on the frontier and add the children that it proposes."""
    pool, frontier_BK, depth, _ = growth
    batch, width = frontier_BK.shape
    parent_BK = _frontier_parents(growth, top_k)
    parent_state = level.state_BKH.gather(
        1, parent_BK.unsqueeze(-1).expand(-1, -1, level.state_BKH.shape[-1])
    )
    seen = level.visible_BKW.gather(
        1, parent_BK.unsqueeze(-1).expand(-1, -1, level.visible_BKW.shape[-1])
    )
    itself = torch.eye(width, dtype=torch.bool, device=state.device).expand(batch, -1, -1)
    visible_BKW = torch.cat([seen, itself], dim=-1)
    depth_W = torch.cat([level.depth_W, level.depth_W.new_full((width,), depth - 1)])
    step = _scratch_step(state, sequences, visible_BKW, depth_W, width)
    token_R = pool.token_BN.gather(1, frontier_BK).flatten()
    out = forward(state, drafter, parent_state.flatten(0, 1), token_R, step, stats)
    state_BKH = out.state_RH.unflatten(0, (batch, width))
    candidates = check_finite(propose(state, sequences, drafter, out.head_RH, depth + 1, top_k))
    grown = trees.extend(growth, candidates, top_k)
    return grown, _Level(state_BKH, visible_BKW, depth_W), candidates


def _frontier_parents(growth: trees.Growth, top_k: int) -> torch.Tensor:
    """Which expanded node of the previous level each frontier node hangs from, ``[B, K]``.

    Children are stored in the order of the nodes that were expanded, ``top_k`` each; level 1 hangs
    from the root, whose state is repeated for every column.
    """
    if growth.depth == 1:
        return growth.frontier_BK
    return (growth.frontier_BK - growth.first) // top_k


def _scratch_step(
    state: State,
    sequences: list[Sequence],
    visible_BKW: torch.Tensor,
    depth_W: torch.Tensor,
    width: int,
) -> AttentionStep:
    windows = [
        Window(
            sequence.index,
            sequence.draft_length,
            len(depth_W) - width,
            sequence.draft_length + depth_W,
            visible_BKW[b],
        )
        for b, sequence in enumerate(sequences)
    ]
    return state.step(windows)
