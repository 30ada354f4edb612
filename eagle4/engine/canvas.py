"""What crosses the functions of a drafted level: limits, terms, the growing tree, its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..config import SpeculativeConfig
from ..drafter import Eagle4Drafter
from ..harness.device_policy import DeviceBook, DevicePrices
from ..harness.policy import Prices
from ..types import Tree


class TreeLimits(NamedTuple):
    """Limits of a round's tree, fixed for a call."""

    max_depth: int
    top_k: int
    max_nodes: int
    min_width: int  # of a level

    @classmethod
    def of(cls, config: SpeculativeConfig, drafter: Eagle4Drafter) -> TreeLimits:
        """The limits that a call's configuration sets."""
        top_k = min(config.width, drafter.num_proposable)
        min_width = top_k if config.mode == "tree" else 1
        return cls(config.max_depth, top_k, config.max_nodes, min_width)

    @property
    def entries(self) -> int:
        """Rows that the drafter may write beyond the committed ones."""
        return max(self.max_depth - 1, 1) * self.top_k


class Terms(NamedTuple):
    """What a round's decisions read.

    ``order``: int64 deepest useful depth, worth of a token, limits ``[B]``, level costs
    ``[top_k + 1]``, verification costs; one tensor, so that it is one copy to the device.
    """

    order: torch.Tensor
    book: DeviceBook

    @classmethod
    def of(cls, limits: Sequence[int], max_depth: int, prices: Prices, book: DeviceBook) -> Terms:
        """For sequences with these depth limits; no level is deeper than ``max_depth``."""
        deepest = min(max(limits), max_depth)
        order = [deepest, prices.token_ns, *limits, *prices.level_ns, *prices.verify_ns]
        return cls(torch.tensor(order, device=book.knots_K.device), book)

    def limits(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Deepest useful depth of the round (0-d) and of every sequence."""
        return self.order[0], self.order[2 : 2 + batch]

    def prices(self, batch: int, top_k: int) -> DevicePrices:
        level_ns, verify_ns = self.order[2 + batch :].tensor_split([top_k + 1])
        return DevicePrices(self.order[1:2], verify_ns.unsqueeze(0), level_ns.unsqueeze(0))


class Canvas(NamedTuple):
    """A tree under construction, its survivals, and what the frontier needs to be expanded."""

    pool: Tree  # [B, P] every node drafted so far, level by level
    prob_BP: torch.Tensor  # int64 draft probabilities in 2^-30
    survival_BP: torch.Tensor  # int64, 0 where a node must not be verified
    node_BK: torch.Tensor  # the frontier, best first: pool indices
    state_BKH: torch.Tensor  # recurrent input of every frontier node
    sees_BKW: torch.Tensor  # drafted rows that it sees: its ancestors
    depth_W: torch.Tensor  # int64 depths of the drafted rows
    num_rows: torch.Tensor  # int64, 0-d: drafted rows so far
    depth: torch.Tensor  # int64, 0-d: levels so far


class Finished(NamedTuple):
    """A draft's end: the tree to verify, which pool nodes it took, what it promises."""

    tree: Tree
    chosen_BP: torch.Tensor  # bool
    promised: torch.Tensor  # int64, 0-d: expected accepted nodes in 2^-30
