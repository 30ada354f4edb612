"""A world without models: scripted acceptance and cost curves, for policies to be compared in.

A node belongs to a difficulty class. Class c makes the drafter report the probabilities
``reported[c]`` for its children, of which child j is right with probability ``true[c][j]`` (at most
one is). Children's classes follow ``next_class[c]``; a round starts from ``root_class``. So the law
of acceptance is known exactly, and a drafter may be well or badly calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle4.harness import CostTable
from eagle4.harness.surface import Surface

MS = 1_000_000


@dataclass(frozen=True)
class Process:
    """A law of drafting and acceptance; rows are difficulty classes."""

    reported: np.ndarray  # [C, J] draft probabilities, best first
    true: np.ndarray  # [C, J] probability that child j is the target's token
    next_class: np.ndarray  # [C, C]
    root_class: np.ndarray  # [C]

    @classmethod
    def mixed(cls, quality: float = 1.0, spread: float = 0.5, children: int = 4) -> Process:
        """Easy, middling and hard positions that come in runs.

        ``quality`` scales acceptance; ``spread`` 0 makes every position middling.
        """
        top = np.array([0.62 + 0.33 * spread, 0.62, 0.62 - 0.5 * spread])
        rest = (1 - top)[:, None] * np.array([0.4, 0.2, 0.12])[None]
        reported = np.concatenate([top[:, None], rest], axis=1)[:, :children]
        runs = np.array([[0.7, 0.2, 0.1], [0.25, 0.5, 0.25], [0.15, 0.3, 0.55]])
        return cls(reported, reported * quality, runs, np.array([0.35, 0.35, 0.3]))


class Costs(NamedTuple):
    """Round costs in nanoseconds as functions of rows; a GPU or CPU in a few numbers."""

    step_ns: float  # a target forward with few rows
    free_rows: int  # rows up to which more rows are (almost) free
    row_ns: float  # each row beyond
    few_row_ns: float  # each row below
    level_ns: float
    level_row_ns: float
    fixed_ns: float  # finish

    def verify(self, rows: int) -> int:
        few, many = min(rows, self.free_rows), max(rows - self.free_rows, 0)
        return int(self.step_ns + few * self.few_row_ns + many * self.row_ns)

    def level(self, rows: int) -> int:
        return int(self.level_ns + rows * self.level_row_ns)

    def table(self, **kwargs) -> CostTable:
        """The same numbers as the harness reads them."""
        grid = sorted({1, 2, 4, 8, 16, 32, self.free_rows, self.free_rows + 1, 4096, 16384})
        levels = Surface.linear(self.level_ns, self.level_row_ns, (1, 16384))
        verify = Surface(grid, [1], [[float(self.verify(r))] for r in grid])
        finish = Surface.linear(self.fixed_ns, 0.0, (1, 2))
        surfaces = {"verify": verify, "plain": verify, "root": levels, "level": levels}
        return CostTable({**surfaces, "finish": finish}, **kwargs)


# The CPU target of this repository, and shapes scaled from the article's figures (a decode forward
# of 3.83 ms, a depth of 123 us, a gap of 20 us): rows are free until the GPU is full.
CPU = Costs(26 * MS, 1, 1.1 * MS, 1.0 * MS, 4.2 * MS, 0.1 * MS, 0.4 * MS)
B300 = Costs(3.8 * MS, 256, 0.012 * MS, 0.0008 * MS, 0.12 * MS, 0.0004 * MS, 0.02 * MS)
H200 = Costs(6.0 * MS, 128, 0.03 * MS, 0.002 * MS, 0.18 * MS, 0.001 * MS, 0.03 * MS)
LINEAR = Costs(0.01 * MS, 1, 1.0 * MS, 1.0 * MS, 0.05 * MS, 0.05 * MS, 0.01 * MS)
FREE_DRAFTER = Costs(20 * MS, 4096, 0.0, 0.0, 1.0, 0.0, 1.0)


class Draft:
    """One round's tree in every sequence, grown level by level. Columns as in the engine's pool."""

    def __init__(self, process: Process, batch: int, rng: np.random.Generator):
        self.process, self.rng = process, rng
        self.class_BP = np.zeros((batch, 0), dtype=np.int64)
        self.true_BP = np.zeros((batch, 0), dtype=bool)
        self.score_BP = np.zeros((batch, 0))
        self.parent_BP = np.zeros((batch, 0), dtype=np.int64)
        self.depth = 0
        root = rng.choice(len(process.root_class), size=(batch, 1), p=process.root_class)
        true = np.ones((batch, 1), dtype=bool)
        self.prob_BC = self._children(root, true, np.zeros((batch, 1)), -np.ones((batch, 1), int))

    def grow(self, frontier_BW: np.ndarray) -> np.ndarray:
        """Expand nodes; returns the children's draft probabilities ``[B, w J]``."""
        take = [
            np.take_along_axis(t, frontier_BW, 1)
            for t in (self.class_BP, self.true_BP, self.score_BP)
        ]
        self.prob_BC = self._children(*take, frontier_BW)
        return self.prob_BC

    def frontier(self, width: int) -> np.ndarray:
        """The best nodes of the last level by draft probability."""
        count = self.prob_BC.shape[1]
        first = self.score_BP.shape[1] - count
        order = np.argsort(-self.score_BP[:, first:], axis=1, kind="stable")
        return first + order[:, :width]

    def tokens(self) -> np.ndarray:
        """1 where a node is right; what is wrong never equals what is committed."""
        return np.where(self.true_BP, 1, 2)

    def committed(self, chosen_BP: np.ndarray) -> list[list[int]]:
        """What verifying these nodes (closed under ancestors) commits: path and bonus."""
        verified = (chosen_BP & self.true_BP).sum(axis=1)
        drafted = self.true_BP.sum(axis=1)
        return [[1] * v + [1 if d > v else 0] for v, d in zip(verified, drafted, strict=True)]

    def _children(self, class_BW, true_BW, score_BW, parent_BW) -> np.ndarray:
        process, (batch, width) = self.process, class_BW.shape
        ranks = process.reported.shape[1]
        prob = process.reported[class_BW]
        drawn = self.rng.random((batch, width, 1))
        right = (drawn < process.true[class_BW].cumsum(-1)).argmax(-1)
        none = drawn[..., 0] >= process.true[class_BW].sum(-1)
        true = (np.arange(ranks) == right[..., None]) & ~none[..., None] & true_BW[..., None]
        steps = process.next_class[class_BW].cumsum(-1)[:, :, None]
        classes = (self.rng.random((batch, width, ranks, 1)) > steps).sum(-1)
        classes = np.minimum(classes, len(process.root_class) - 1)
        score = score_BW[..., None] + np.log(prob)

        def flat(table):
            return table.reshape(batch, -1)

        self.depth += 1
        self.class_BP = np.concatenate([self.class_BP, flat(classes)], 1)
        self.true_BP = np.concatenate([self.true_BP, flat(true)], 1)
        self.score_BP = np.concatenate([self.score_BP, flat(score)], 1)
        parents = np.repeat(parent_BW, ranks, axis=1)
        self.parent_BP = np.concatenate([self.parent_BP, parents], 1)
        return flat(prob)
