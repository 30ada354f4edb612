"""Draw one tree per sequence into slots that were fixed beforehand (rejection sampling).

Which slots there are follows from earlier rounds; what is drawn into them changes nothing about
the shape, so the acceptance test of `verify.rejection` is exact.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from .. import tree as trees
from ..cache import Window
from ..drafter import DraftOutput, Eagle4Drafter
from ..harness import HarnessPolicy
from ..noise import Purpose
from ..types import Drawn, Law, Plan, Tree
from .adaptive import Lap
from .drafter_rows import DraftError, forward
from .drafting import EagleDraft, catch_up
from .level import MAX_CANDIDATES
from .sampler import Sampler
from .state import Sequence, State
from .stats import SpeculationStats

# Slots whose node would be accepted more rarely cost more than they bring.
MIN_SURVIVAL = 0.02


class TemplateDraft(EagleDraft):
    """Draws its tokens. Under a harness the tree is as large as earlier rounds say that it pays."""

    def __call__(
        self,
        state: State,
        sequences: list[Sequence],
        plan: Plan,
        depth_limit: list[int],
        stats: SpeculationStats,
    ) -> Tree | Drawn:
        """Raises `DraftError` when the law behind a root is not finite.

        Deeper down such a law gives no children. Either is decided before anything is drawn from
        it.
        """
        assert state.sampler is not None
        harness = self.policy if isinstance(self.policy, HarnessPolicy) else None
        top_k = min(plan.top_k, self.drafter.num_proposable)
        depth, most = min(plan.max_depth, max(depth_limit)), plan.max_nodes
        table = state.sampler.ranks.table(depth, top_k)
        if harness is not None:
            depth, most = harness.shape_of_draws(table)
        template = trees.best_template(table[:depth], most, top_k, MIN_SURVIVAL)
        drawn = _Drawing(state, sequences, self.drafter, template, harness).run(stats)
        limit_B1 = torch.tensor(depth_limit, device=state.device).unsqueeze(1)
        exists_BN = drawn.tree.score_BN > float("-inf")
        drawn = trees.keep_slots(drawn, exists_BN & (drawn.tree.depth_BN <= limit_B1))
        if harness is not None:
            harness.drew(max(template.depth), int(drawn.tree.count_B.sum()))
        return drawn


class _Drawing:
    """One tree per sequence under construction; slots are columns."""

    def __init__(
        self,
        state: State,
        sequences: list[Sequence],
        drafter: Eagle4Drafter,
        template: trees.Template,
        harness: HarnessPolicy | None = None,
    ):
        assert state.sampler is not None
        self.state, self.sequences, self.drafter = state, sequences, drafter
        self.sampler: Sampler = state.sampler
        self.template = template
        self.harness = harness
        self.children: dict[int, list[int]] = {}
        for slot, parent in enumerate(template.parent):
            self.children.setdefault(parent, []).append(slot)
        batch, nodes, device = len(sequences), len(template.parent), state.device
        self.parent_N = torch.tensor(template.parent, device=device)
        self.depth_N = torch.tensor(template.depth, device=device)
        self.sees_NN = trees.ancestor_matrix(self.parent_N.unsqueeze(0))[0]
        width = min(drafter.num_proposable, MAX_CANDIDATES)
        self.token_BN = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
        self.score_BN = torch.full((batch, nodes), float("-inf"), device=device)
        shape = (batch, nodes + 1, width)
        self.law = Law(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.full(shape, float("-inf"), dtype=torch.float64, device=device),
        )
        self.recurrent: dict[int, torch.Tensor] = {}  # slot -> [B, H] input of its children
        self.scratch: list[int] = []  # expanded slots in the order of their draft K/V

    def run(self, stats: SpeculationStats) -> Drawn:
        self.state.reserve_scratch(self.sequences, len(self.children))
        lap, num_pending = Lap(), sum(s.num_pending for s in self.sequences)
        root = catch_up(self.state, self.sequences, self.drafter, stats)
        self._draw([-1], root, depth=1)
        self._timed("root", num_pending, lap)
        if not torch.isfinite(self.law.logp_BRC[:, 0].amax(dim=-1)).all():
            raise DraftError("the drafter's probabilities are not finite")
        depth = 1
        while level := [s for s in self.children if s >= 0 and self.template.depth[s] == depth]:
            out = self._expand(level, stats)
            depth += 1
            self._draw(level, out, depth)
            self._timed("level", len(self.sequences) * len(level), lap)
        batch = len(self.sequences)
        stats.nodes_drafted += self.token_BN.numel()
        count_B = torch.full((batch,), len(self.parent_N), device=self.state.device)
        parent_BN, depth_BN = self.parent_N.repeat(batch, 1), self.depth_N.repeat(batch, 1)
        return Drawn(Tree(self.token_BN, parent_BN, depth_BN, self.score_BN, count_B), self.law)

    def _timed(self, kind: str, rows: int, lap: Lap) -> None:
        if self.harness is not None:
            self.harness.timed(kind, rows, lap.ns())

    def _expand(self, level: list[int], stats: SpeculationStats) -> DraftOutput:
        """Run the drafter on these slots of every sequence; rows are (sequence, slot) pairs."""
        state, first = self.state, len(self.scratch)
        self.scratch += level
        parents = [self.template.parent[slot] for slot in level]
        hidden_BKH = torch.stack([self.recurrent[parent] for parent in parents], dim=1)
        depth_W = self.depth_N[self.scratch]
        visible_KW = self.sees_NN[level][:, self.scratch]
        windows = [
            Window(s.index, s.draft_length, first, s.draft_length + depth_W - 1, visible_KW)
            for s in self.sequences
        ]
        step = state.step(windows)
        tokens = self.token_BN[:, level].flatten()
        return forward(state, self.drafter, hidden_BKH.flatten(0, 1), tokens, step, stats)

    def _draw(self, level: Rows[int], out: DraftOutput, depth: int) -> None:
        """Draw the children of the level's slots, without replacement, elder siblings first."""
        batch, width = len(self.sequences), self.law.token_BRC.shape[-1]
        candidates = self.sampler.law(self.state.graphs.propose(self.drafter, out.head_RH, width))
        token_RC, logq_RC = candidates
        is_law_R1 = torch.isfinite(logq_RC.logsumexp(dim=-1, keepdim=True))
        logq_RC = torch.where(is_law_R1, logq_RC, float("-inf"))
        noise_RC = self.sampler.noise(Purpose.DRAFT, self.sequences, depth, token_RC)
        most = max(len(self.children[slot]) for slot in level)
        order_RK = (logq_RC + noise_RC).topk(min(most, width), dim=-1).indices
        drawn_BLK = token_RC.gather(1, order_RK).unflatten(0, (batch, -1))
        logq_BLK = logq_RC.gather(1, order_RK).unflatten(0, (batch, -1))
        state_BLH = out.state_RH.unflatten(0, (batch, -1))
        for i, slot in enumerate(level):
            self.recurrent[slot] = state_BLH[:, i]
            self.law.token_BRC[:, slot + 1] = token_RC.unflatten(0, (batch, -1))[:, i]
            self.law.logp_BRC[:, slot + 1] = logq_RC.unflatten(0, (batch, -1))[:, i]
            columns = self.children[slot]
            above_B1 = 0.0 if slot < 0 else self.score_BN[:, slot, None]
            self.token_BN[:, columns] = drawn_BLK[:, i, : len(columns)]
            self.score_BN[:, columns] = (above_B1 + logq_BLK[:, i, : len(columns)]).float()
