"""What a generation knows between rounds: tokens, cache lengths and pending features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..cache import AttentionStep, PageTable, Window, build_step
from .graphs import EAGER, Graphs

if TYPE_CHECKING:
    from .sampler import Sampler


@dataclass
class Sequence:
    """One row of the call. Lengths do not count left padding."""

    index: int  # row of the ids buffer and of the page table
    pad: int  # left padding in the ids buffer
    length: int  # committed tokens; the last one is the root and has no KV yet
    kv_length: int = 0  # committed entries of the target cache
    draft_length: int = 0  # committed entries of the draft cache
    # Taps [k, T, H] not yet drafted on, in order, and their rows: many parts where it never pays.
    pending: list[torch.Tensor] = field(default_factory=list)
    num_pending: int = 0
    new_tokens: int = 0
    done: bool = False  # a stopping criterion fired

    def keep(self, features: torch.Tensor) -> None:
        """More features wait for the drafter."""
        self.pending.append(features)
        self.num_pending += len(features)

    def take(self, most: int) -> torch.Tensor:
        """The first of them, at most so many rows."""
        features = torch.cat(self.pending)
        self.forget()
        if len(features) > most:
            self.keep(features[most:])
        return features[:most]

    def forget(self) -> None:
        """Nothing waits any more."""
        self.pending, self.num_pending = [], 0


class State:
    """Token buffer, page table and pools of all sequences of one call.

    ``ids_BT`` holds every row as Transformers would: left padding, prompt, generated tokens. The
    first ``known`` columns came from a cache, not from the caller. ``sampler`` draws the tokens;
    None decodes greedily. ``graphs`` are the functions that the rounds run.
    """

    def __init__(
        self,
        ids_BP: torch.Tensor,
        pads: list[int],
        pad_token: int,
        known: int = 0,
        sampler: Sampler | None = None,
        graphs: Graphs = EAGER,
    ):
        self.prompt_length = ids_BP.shape[1]
        self.known = known
        self.pad_token = pad_token
        self.sampler = sampler
        self.needs_rows = False  # whole rows of scores or logits leave the engine
        self.graphs = graphs
        self.ids_BT = ids_BP.clone()
        self.host_ids_BT = self.ids_BT.cpu()  # itself on CPUs: reading it waits for nobody
        self.table = PageTable(len(ids_BP))
        self.target_pool = graphs.pool("target")
        self.draft_pool = graphs.pool("draft")
        self.sequences = [
            Sequence(index, pad, self.prompt_length - pad) for index, pad in enumerate(pads)
        ]

    @property
    def device(self) -> torch.device:
        return self.ids_BT.device

    def tokens(self, sequence: Sequence) -> torch.Tensor:
        """Committed ids without padding, ``[length]``."""
        return self.ids_BT[sequence.index, sequence.pad : sequence.pad + sequence.length]

    def history(self, sequence: Sequence) -> torch.Tensor:
        """Committed ids with padding, as processors and criteria see them.

        As in Transformers they see what the caller passed, not what only the cache knows.
        """
        return self.ids_BT[sequence.index, self.known : sequence.pad + sequence.length]

    def history_on_host(self, sequence: Sequence) -> torch.Tensor:
        """The same on the CPU, whatever the device."""
        return self.host_ids_BT[sequence.index, self.known : sequence.pad + sequence.length]

    def committed(self, sequence: Sequence, length: int) -> list[int]:
        """Its tokens from the ``length``-th on."""
        first, last = sequence.pad + length, sequence.pad + sequence.length
        return self.host_ids_BT[sequence.index, first:last].tolist()

    def append(self, sequence: Sequence, token: int) -> None:
        """Commit one token."""
        column = sequence.pad + sequence.length
        if column == self.ids_BT.shape[1]:
            self.grow()
        self.ids_BT[sequence.index, column] = token
        if self.host_ids_BT is not self.ids_BT:
            self.host_ids_BT[sequence.index, column] = token
        sequence.length += 1
        sequence.new_tokens += 1

    def grow(self) -> None:
        """Room for more tokens."""
        batch, columns = self.ids_BT.shape
        more = self.ids_BT.new_full((batch, max(64, columns)), self.pad_token)
        self.ids_BT = torch.cat([self.ids_BT, more], dim=1)
        self.host_ids_BT = self.ids_BT.cpu()

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Make room for ``num_tokens`` cache entries of the sequence in both pools."""
        if self.table.ensure(sequence.index, num_tokens):
            self.target_pool.resize(self.table.num_slots)
            self.draft_pool.resize(self.table.num_slots)

    def reserve_scratch(self, sequences: list[Sequence], num_entries: int) -> None:
        """Make room for the pending rows and ``num_entries`` drafted ones of every sequence."""
        for sequence in sequences:
            committed = sequence.draft_length + sequence.num_pending
            self.reserve(sequence, committed + num_entries)

    def forget_drafts(self) -> None:
        """Drop draft K/V and pending features: after a failure nothing about them is certain."""
        for sequence in self.sequences:
            sequence.draft_length = 0
            sequence.forget()
        self.draft_pool.layers.clear()

    def step(self, windows: list[Window]) -> AttentionStep:
        """Index tensors of a forward of drafted or verified rows."""
        graphs = self.graphs
        setting = {"gathers": graphs.compiled, "bucketed": graphs.replays is not None}
        return build_step(self.table, windows, self.device, **setting)

    def release(self, sequence: Sequence) -> None:
        """Give the sequence's pages back."""
        self.table.release(sequence.index)
