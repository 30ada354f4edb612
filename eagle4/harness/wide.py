"""Drafted nodes of many sequences: as `nodes.Nodes`, with the policy's tensor twin inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import device_policy
from .acceptance import Book, Experience
from .device_policy import DevicePrices
from .fixed_point import ONE
from .nodes import TAUGHT, Nodes
from .policy import Decision, Prices


class WideNodes:
    """Columns ``[B, P]`` of one round; probabilities may come as tensors or lists."""

    def __init__(self, limits: Sequence[int], book: Book):
        self.limits = limits
        self.book = book
        self._limit_B = torch.tensor(limits)
        self._device_book = device_policy.device_book(book)
        none = torch.zeros(len(limits), 0, dtype=torch.int64)
        self._prob_BP = self._survival_BP = none
        self._taught = Nodes(limits[:TAUGHT], book)
        self.depth = self.top_k = 0

    def add_level(self, frontier: Sequence[Sequence[int]], probs) -> None:
        """As `Nodes.add_level`."""
        self.depth += 1
        prob_BC, frontier_BW = torch.as_tensor(probs), torch.as_tensor(frontier)
        self.top_k = prob_BC.shape[1] // frontier_BW.shape[1]
        if self.depth == 1:
            parent_BW = torch.full_like(frontier_BW, ONE)
        else:
            parent_BW = self._survival_BP.gather(1, frontier_BW)
        parent_BW = parent_BW * (self._limit_B >= self.depth).unsqueeze(1)
        survival = device_policy.survivals(
            parent_BW[None],
            prob_BC.unflatten(1, (-1, self.top_k))[None],
            torch.tensor(self.depth),
            self._device_book,
        )
        self._prob_BP = torch.cat([self._prob_BP, prob_BC], dim=1)
        self._survival_BP = torch.cat([self._survival_BP, survival[0].flatten(1)], dim=1)
        self._taught.add_level(frontier_BW[:TAUGHT].tolist(), prob_BC[:TAUGHT].tolist())

    def next_level(
        self, frontier: Sequence[Sequence[int]], max_depth: int, is_tree: bool, prices: Prices
    ) -> Decision:
        """As `Nodes.next_level`."""
        frontier_BK = torch.as_tensor(frontier)
        width = frontier_BK.shape[1]
        found = device_policy.next_level(
            self._survival_BP[None],
            self._survival_BP.gather(1, frontier_BK)[None],
            self._prob_BP.gather(1, frontier_BK)[None],
            torch.tensor(self.depth),
            torch.tensor(max_depth),
            width if is_tree else 1,
            self.top_k,
            prices.max_nodes,
            self._device_book,
            as_tensors(prices),
        )
        return Decision(bool(found.go_Z), int(found.width_Z), int(found.gain_ns_Z))

    def choose(self, prices: Prices) -> list[list[int]]:
        """As `Nodes.choose`."""
        pool = self._survival_BP[None]
        chosen_BP = device_policy.choose(pool, prices.max_nodes, as_tensors(prices))[0]
        found: list[list[int]] = [[] for _ in self.limits]
        for b, i in chosen_BP.nonzero().tolist():
            found[b].append(i)
        return found

    def promised(self, chosen: Sequence[Sequence[int]]) -> int:
        """As `Nodes.promised`."""
        rows = [b for b, row in enumerate(chosen) for _ in row]
        columns = [i for row in chosen for i in row]
        return int(self._survival_BP[rows, columns].sum())

    def forecast_into(self, experience: Experience) -> None:
        """As `Nodes.forecast_into`, from the first sequences."""
        self._taught.forecast_into(experience)

    def learn(self, b: int, *args) -> None:
        """As `Nodes.learn`, from the first sequences."""
        if b < TAUGHT:
            self._taught.learn(b, *args)

    def for_report(self) -> Nodes:
        """The first sequences in detail."""
        return self._taught


def as_tensors(prices: Prices) -> DevicePrices:
    """Prices of one round."""
    return DevicePrices(
        torch.tensor([prices.token_ns]),
        torch.tensor([prices.verify_ns]),
        torch.tensor([prices.level_ns]),
    )
