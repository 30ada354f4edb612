"""The parts of a round as callables, on a made-up state of any size: what `measure` times.

The same functions that a generation runs, on zero caches. Nothing is committed.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import LogitsProcessorList

from .. import tree as trees
from ..drafter import DraftOutput, Eagle4Drafter
from ..target import TargetAdapter
from ..types import Candidates, Tree
from .adaptive import _probabilities, take
from .drafting import catch_up, expand, propose, root_level
from .graphs import EAGER, Graphs
from .measure import Case, Grid
from .reference import empty_tree, verify
from .state import State
from .stats import SpeculationStats


class Stage:
    """A state of ``batch`` sequences with ``context`` committed tokens each."""

    def __init__(
        self,
        target: TargetAdapter,
        drafter: Eagle4Drafter | None,
        batch: int,
        context: int,
        graphs: Graphs = EAGER,
    ):
        self.target = target
        self.drafter: Eagle4Drafter = drafter  # type: ignore[assignment]  # plain parts need none
        ids = torch.ones(batch, context + 1, dtype=torch.int64, device=target.device)
        self.state = State(ids, [0] * batch, 0, graphs=graphs)
        self.context = context
        for sequence in self.state.sequences:
            self.state.reserve(sequence, context + 640)
            sequence.kv_length = sequence.draft_length = context

    def verify(self, nodes: int) -> None:
        """Root and a chain of ``nodes`` per sequence through the target, to the verdict."""
        state = self.state
        batch = len(state.sequences)
        tree = chain(batch, nodes, state.device) if nodes else empty_tree(batch, state.device)
        processors = [LogitsProcessorList() for _ in state.sequences]
        verify(state, state.sequences, tree, self.target, processors).verdict.length_B.tolist()

    def root(self, rows: int, num_sequences: int = 1) -> None:
        """``rows`` verified rows of each of the first sequences through the drafter."""
        state, drafter = self.state, self.drafter
        sequences = state.sequences[:num_sequences]
        rows = min(rows, self.context)
        taps, width = len(drafter.config.tap_layers), drafter.config.target_hidden_size
        for sequence in sequences:
            sequence.draft_length = self.context - rows
            zeros = torch.zeros(rows, taps, width, device=state.device, dtype=drafter.dtype)
            sequence.pending = [zeros]
        root = catch_up(state, sequences, drafter, SpeculationStats())
        width = min(4, drafter.num_proposable)
        _probabilities(propose(state, sequences, drafter, root.head_RH, 1, width), num_sequences)

    def level(self, width: int) -> None:
        """One more drafter level of ``width`` nodes per sequence."""
        batch = len(self.state.sequences)
        size = (batch, self.drafter.config.hidden_size)
        root = torch.zeros(size, device=self.state.device, dtype=self.drafter.dtype)
        ones = torch.ones(batch, width, dtype=torch.int64, device=self.state.device)
        growth = trees.start(Candidates(ones, -ones.float()), 2, width)
        level = root_level(DraftOutput(root, root), width)
        setting = self.state, self.state.sequences, self.drafter
        _, _, candidates = expand(*setting, growth, level, width, SpeculationStats())
        _probabilities(candidates, batch)

    def finish(self) -> None:
        """Choosing and pruning."""
        batch = len(self.state.sequences)
        take(chain(batch, 16, self.state.device), [list(range(8))] * batch)


def make_cases(
    target: TargetAdapter, drafter: Eagle4Drafter, grid: Grid, graphs: Graphs = EAGER
) -> dict:
    """``(kind, rows, context) -> callable`` for every point of a grid that the target can hold."""
    text = target.config
    longest = getattr(text, "max_position_embeddings", None) or 1 << 30
    most = max(grid.verify_rows)
    contexts = sorted({min(c, max(longest - most - 1, 1)) for c in grid.contexts})
    widest = min(4, drafter.num_proposable)
    cases: dict[tuple[str, int, int], Case] = {}
    for context in contexts:
        stages = {
            batch: Stage(target, drafter, batch, context, graphs)
            for batch in sorted(
                {1, *grid.plain_batches, *(-(-r // widest) for r in grid.level_rows)}
            )
        }
        for rows in grid.verify_rows:
            cases["verify", rows, context] = partial(stages[1].verify, rows - 1)
        for batch in grid.plain_batches:
            cases["plain", batch, context] = partial(stages[batch].verify, 0)
            cases["finish", batch, context] = stages[batch].finish
        # The same points at every context: a surface is a full grid.
        for rows in sorted({min(r, contexts[0]) for r in grid.root_rows}):
            cases["root", rows, context] = partial(stages[1].root, rows)
        for rows in grid.level_rows:
            batch = -(-rows // widest)
            cases["level", rows // batch * batch, context] = partial(
                stages[batch].level, rows // batch
            )
    return cases


def chain(batch: int, nodes: int, device: torch.device) -> Tree:
    """A tree of width 1 in every sequence."""
    index = torch.arange(nodes, device=device).repeat(batch, 1)
    ones = torch.ones_like(index)
    return Tree(ones, index - 1, index + 1, -index.float() - 1, ones.sum(dim=1))
