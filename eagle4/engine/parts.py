"""The parts of a round as callables, on a made-up state of any size: what `measure` times.

The same functions that a generation runs, on zero caches. Nothing is committed.
"""

from __future__ import annotations

from functools import cached_property, partial

import torch
from transformers import LogitsProcessorList

from .. import tree as trees
from ..cache import Scratch
from ..drafter import DraftOutput, Eagle4Drafter
from ..harness.acceptance import Experience
from ..harness.device_policy import DeviceBook, device_book
from ..harness.policy import Prices
from ..target import TargetAdapter
from ..types import Candidates, Tree
from .adaptive import _probabilities, take
from .canvas import Canvas, Terms, TreeLimits
from .drafter_rows import draft_pools, propose
from .drafting import catch_up, expand, root_level
from .graphs import EAGER, Graphs
from .level import start
from .measure import Case, Grid
from .on_device import scratch_of
from .reference import empty_tree, verify
from .state import State
from .stats import SpeculationStats


class Stage:
    """A state of ``batch`` sequences with ``context`` committed tokens each.

    ``limits``: of the trees that the device decides on; without, or where it decides on none,
    drafts are led by the host.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: Eagle4Drafter | None,
        batch: int,
        context: int,
        graphs: Graphs = EAGER,
        limits: TreeLimits | None = None,
    ):
        self.target = target
        self.drafter: Eagle4Drafter = drafter  # type: ignore[assignment]  # plain parts need none
        ids = torch.ones(batch, context + 1, dtype=torch.int64, device=target.device)
        self.state = State(ids, [0] * batch, 0, graphs=graphs)
        self.context = context
        for sequence in self.state.sequences:
            room = 640 if limits is None else max(640, limits.entries)
            self.state.reserve(sequence, context + room)
            sequence.kv_length = sequence.draft_length = context
        self.limits = limits if graphs.decides_on(target.device) else None

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
            sequence.forget()
            sequence.keep(zeros)
        root = catch_up(state, sequences, drafter, SpeculationStats())
        if (limits := self.limits) is not None:
            terms = self._terms(limits, num_sequences)
            state.graphs.trees(limits).open_tree(drafter, root, terms, limits)[1].tolist()
            return
        width = min(4, drafter.num_proposable)
        _probabilities(propose(state, sequences, drafter, root.head_RH, 1, width), num_sequences)

    def level(self, width: int) -> None:
        """One more drafter level of ``width`` nodes per sequence."""
        state, drafter = self.state, self.drafter
        batch = len(state.sequences)
        if (limits := self.limits) is not None:
            canvas, scratch, terms = self._canvas
            setting = draft_pools(state, drafter), scratch, terms, limits, width
            state.graphs.trees(limits).level(drafter, canvas, *setting)[1].tolist()
            return
        growth = trees.start(self._children(width), 2, width)
        level = root_level(self._root, width)
        setting = state, state.sequences, drafter
        _, _, candidates = expand(*setting, growth, level, width, SpeculationStats())
        _probabilities(candidates, batch)

    def finish(self) -> None:
        """Choosing and pruning."""
        state, batch = self.state, len(self.state.sequences)
        if (limits := self.limits) is not None:
            canvas, _, terms = self._canvas
            finished = state.graphs.trees(limits).finish(canvas, terms, limits)
            finished.tree.token_BN.tolist()
        else:
            take(chain(batch, 16, state.device), [list(range(8))] * batch)

    @property
    def _root(self) -> DraftOutput:
        size = (len(self.state.sequences), self.drafter.config.hidden_size)
        zeros = torch.zeros(size, device=self.state.device, dtype=self.drafter.dtype)
        return DraftOutput(zeros, zeros)

    def _children(self, width: int) -> Candidates:
        shape = len(self.state.sequences), width
        ones = torch.ones(shape, dtype=torch.int64, device=self.state.device)
        return Candidates(ones, -ones.float())

    @cached_property
    def _canvas(self) -> tuple[Canvas, Scratch, Terms]:
        state, limits = self.state, self.limits
        assert limits is not None
        terms = self._terms(limits, len(state.sequences))
        canvas, _ = start(self._root, self._children(limits.top_k), terms, limits)
        return canvas, scratch_of(state, state.sequences, limits), terms

    @cached_property
    def _book(self) -> DeviceBook:
        return device_book(Experience().book(), self.state.device)

    def _terms(self, limits: TreeLimits, batch: int) -> Terms:
        """A token is worth a second and everything else is free."""
        free = [0] * (batch * limits.max_nodes + 1), [0] * (limits.top_k + 1)
        prices = Prices(10**9, *free, limits.max_nodes)
        return Terms.of([limits.max_depth] * batch, limits.max_depth, prices, self._book)


def make_cases(
    target: TargetAdapter,
    drafter: Eagle4Drafter,
    grid: Grid,
    limits: TreeLimits,
    graphs: Graphs = EAGER,
) -> dict:
    """``(kind, rows, context) -> callable`` for every point of a grid that the target can hold."""
    text = target.config
    longest = getattr(text, "max_position_embeddings", None) or 1 << 30
    most = max(grid.verify_rows)
    contexts = sorted({min(c, max(longest - most - 1, 1)) for c in grid.contexts})
    widest = limits.top_k
    cases: dict[tuple[str, int, int], Case] = {}
    for context in contexts:
        stages = {
            batch: Stage(target, drafter, batch, context, graphs, limits)
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
