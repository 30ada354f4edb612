"""Packed forwards by hand: rows of trees behind prefixes, without the engine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from eagle4.cache import KVPool, PageTable, Window, build_step
from eagle4.cache.layer import write_rows
from eagle4.target import TargetAdapter, TargetOutput


class Rows(NamedTuple):
    """What one sequence contributes: tokens behind ``prefix``, each under a parent (-1: prefix)."""

    sequence: int
    prefix: int
    tokens: list[int]
    parents: list[int]


def chain(sequence: int, prefix: int, tokens: list[int]) -> Rows:
    """Each token under the one before."""
    return Rows(sequence, prefix, tokens, list(range(-1, len(tokens) - 1)))


def ancestry(parents: list[int]) -> torch.Tensor:
    """``[n, n]`` bool: row i sees j when j is i or an ancestor of i."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def window(rows: Rows) -> Window:
    """The `Window` of rows that are all new; a row's position follows from its depth."""
    seen = ancestry(rows.parents)
    return Window(rows.sequence, rows.prefix, 0, rows.prefix + seen.sum(dim=1) - 1, seen)


def store(
    pool: KVPool, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write rows as a layer does; returns the layer's whole (K, V)."""
    pair = pool.pair(layer, key, value)
    write_rows(*pair, slots, key, value)
    return pair


class Packer:
    """A target with a page table and a pool of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_sequences: int = 1,
        taps: list[int] | None = None,
        page_size: int = 64,
    ):
        self.adapter = TargetAdapter(model, taps)
        self.table = PageTable(num_sequences, page_size)
        self.pool = KVPool()

    def reserve(self, *sequences: int, tokens: int = 64) -> None:
        """Room for the sequences, in that order."""
        for sequence in sequences:
            self.table.ensure(sequence, tokens)

    def scatter(self, num_sequences: int, tokens: int = 64) -> None:
        """Interleave the pages of all sequences, so that none is one run of slots."""
        for size in range(1, tokens + 1, self.table.page_size):
            self.reserve(*range(num_sequences), tokens=size)

    @torch.no_grad()
    def run(self, *parts: Rows, is_prompt: bool = False, **kwargs) -> TargetOutput:
        """One packed forward. Missing room is made first. Recurrent layers keep prompts only."""
        for part in parts:
            self.table.ensure(part.sequence, part.prefix + len(part.tokens))
        self.pool.resize(self.table.num_slots)
        windows = [window(part) for part in parts]
        step = build_step(self.table, windows, self.adapter.device, is_prompt)
        tokens = torch.tensor([token for part in parts for token in part.tokens])
        with self.adapter.attached():
            return self.adapter.forward(tokens, step, self.pool, **kwargs)


@torch.no_grad()
def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits ``[n, V]`` of a plain forward without any cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
