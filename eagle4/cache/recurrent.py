"""Committed state of recurrent layers: last convolution inputs and float32 recurrent state.

Verification only reads it. Every verified row leaves its inputs here (a fraction of a state);
`commit` names the accepted rows, and before the next forward `settle` replays them in one launch
for all layers and sequences. So the state depends on the accepted path alone, not on the tree that
it was found in. Prompts are committed as they run. Snapshots at block boundaries let an edited
conversation go on from the nearest one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..ops import advance_gdn_
from .lineage import Lineage, as_slice

MOST_SNAPSHOTS = 4  # of a sequence; the oldest goes first
_BROKEN = -1  # length of a state that a forward left half written


class StateShape(NamedTuple):
    """What one recurrent layer keeps of a sequence."""

    channels: int  # of the short convolution
    width: int  # taps of the convolution; the last width - 1 inputs are kept
    heads: int = 0  # 0: the convolution is all there is
    key_width: int = 0
    value_width: int = 0

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.key_width, self.value_width


class StateRows(NamedTuple):
    """Inputs of the recurrence of a forward's rows, in one layer; see `ops.tree_gdn`."""

    key_RGK: torch.Tensor
    value_RHV: torch.Tensor
    decay_RH: torch.Tensor
    beta_RH: torch.Tensor | None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> StateRows:
        """The function's results; no beta stays none."""
        key, value, decay, beta = self
        beta = None if beta is None else function(beta)
        return StateRows(function(key), function(value), function(decay), beta)


class Snapshot(NamedTuple):
    """State of one sequence after ``length`` tokens."""

    length: int
    conv_LWC: torch.Tensor
    state_LHKV: torch.Tensor


class RecurrentPool:
    """State of all recurrent layers of one model, by sequence.

    ``layers``: their numbers in the model. Rows appear as sequences do.
    """

    def __init__(
        self, shape: StateShape, layers: list[int], dtype: torch.dtype, device: torch.device
    ):
        self.shape = shape
        self.place = {layer: place for place, layer in enumerate(layers)}
        inputs = len(layers), 0, shape.width - 1, shape.channels
        self.conv_LSWC = torch.zeros(inputs, dtype=dtype, device=device)
        self.state_LSHKV = torch.zeros((len(layers), 0, *shape.state), device=device)
        self.lengths: list[int] = []  # tokens that each sequence's state holds
        self.snapshots: list[list[Snapshot]] = []
        self.conv_rows: dict[int, torch.Tensor] = {}  # by place: [R, C]
        self.state_rows: dict[int, StateRows] = {}
        self._lineage: Lineage | None = None
        self._taken: Snapshot | None = None
        self._accepted: dict[int, list[int]] = {}  # packed rows by sequence

    def begin(self, lineage: Lineage) -> None:
        """Before a forward: the state is brought up to date, the last forward's rows are dropped.

        A prompt that starts at token 0 starts from nothing.
        """
        self.settle()
        self._grow(max(lineage.sequences) + 1)
        self.conv_rows.clear()
        self.state_rows.clear()
        self._lineage, self._taken = lineage, None
        if lineage.is_prompt:
            for sequence, prefix in zip(lineage.sequences, lineage.prefixes, strict=True):
                if prefix == 0:
                    self.restore(sequence, 0)
                assert self.lengths[sequence] == prefix, "the state is not where the prompt begins"
                self.lengths[sequence] = _BROKEN

    def finish(self) -> None:
        """After a forward that ran to its end."""
        lineage = self._lineage
        assert lineage is not None
        if not lineage.is_prompt:
            return
        rows = zip(lineage.sequences, lineage.prefixes, lineage.counts, strict=True)
        for sequence, prefix, count in rows:
            self.lengths[sequence] = prefix + count
        if self._taken is not None:
            kept = self.snapshots[lineage.sequences[0]]
            kept.append(self._taken)
            del kept[:-MOST_SNAPSHOTS]

    def commit(self, sequence: int, rows: list[int]) -> None:
        """Accept rows of the last forward: window indices along the path, the root first."""
        lineage = self._lineage
        assert lineage is not None and sequence in lineage.sequences
        b = lineage.sequences.index(sequence)
        assert self.lengths[sequence] == lineage.prefixes[b], (
            "the state is not where the rows begin"
        )
        first = lineage.first_rows[b]
        self._accepted[sequence] = [first + row for row in rows]
        self.lengths[sequence] += len(rows)

    def settle(self) -> None:
        """Replay the accepted rows. The state then holds `lengths` tokens of every sequence."""
        accepted, self._accepted = dict(sorted(self._accepted.items())), {}
        if accepted:
            self._replay(as_slice(list(accepted)), list(accepted.values()))

    def _replay(self, slots: slice | list[int], paths: list[list[int]]) -> None:
        device = self.conv_LSWC.device
        count_B = torch.tensor([len(path) for path in paths], device=device)
        most = max(len(path) for path in paths)
        index_BN = torch.tensor([path + path[:1] * (most - len(path)) for path in paths])
        index_BN = index_BN.to(device)
        conv_LBNC = torch.stack([self.conv_rows[p] for p in range(len(self.place))])[:, index_BN]
        both_LBNC = torch.cat([self.conv_LSWC[:, slots], conv_LBNC], dim=2)
        last_BW = count_B[:, None] + torch.arange(self.shape.width - 1, device=device)
        last_LBWC = last_BW[None, :, :, None].expand(len(self.place), -1, -1, self.shape.channels)
        self.conv_LSWC[:, slots] = both_LBNC.gather(2, last_LBWC)
        if self.shape.heads:
            is_row_BN = torch.arange(most, device=device) < count_B[:, None]
            self._replay_state(slots, index_BN, is_row_BN)

    def _replay_state(
        self, slots: slice | list[int], index_BN: torch.Tensor, is_row_BN: torch.Tensor
    ) -> None:
        parts = [self.state_rows[place] for place in range(len(self.place))]
        betas = [part.beta_RH for part in parts if part.beta_RH is not None]
        stacked = StateRows(
            torch.stack([part.key_RGK for part in parts]),
            torch.stack([part.value_RHV for part in parts]),
            torch.stack([part.decay_RH for part in parts]),
            torch.stack(betas) if betas else None,
        )

        def along_paths(x: torch.Tensor) -> torch.Tensor:
            # A row of zeros changes nothing.
            is_row = is_row_BN.view(*is_row_BN.shape, *[1] * (x.ndim - 2))
            return x[:, index_BN].masked_fill(~is_row, 0)

        rows = stacked.map(along_paths).map(lambda x: x.flatten(0, 1))
        # In place when all sequences take part; otherwise through a copy of those that do.
        if slots == slice(0, self.state_LSHKV.shape[1]):
            advance_gdn_(self.state_LSHKV.flatten(0, 1), *rows)
            return
        state_LBHKV = self.state_LSHKV[:, slots].contiguous()
        advance_gdn_(state_LBHKV.flatten(0, 1), *rows)
        self.state_LSHKV[:, slots] = state_LBHKV

    def snapshot(self) -> Snapshot:
        """To be filled by every layer with its state at the lineage's `snapshot_row`."""
        lineage = self._lineage
        assert lineage is not None and lineage.snapshot_row is not None
        if self._taken is None:
            sequence = lineage.sequences[0]
            conv, state = self.conv_LSWC[:, sequence], self.state_LSHKV[:, sequence]
            length = lineage.prefixes[0] + lineage.snapshot_row
            self._taken = Snapshot(length, torch.empty_like(conv), torch.empty_like(state))
        return self._taken

    def resumable(self, sequence: int) -> list[int]:
        """Lengths from which the sequence can go on, longest first; 0 is always one."""
        if sequence >= len(self.lengths):
            return [0]
        lengths = {0, self.lengths[sequence], *(s.length for s in self.snapshots[sequence])}
        return sorted(lengths - {_BROKEN}, reverse=True)

    def restore(self, sequence: int, length: int) -> None:
        """Go back to one of the `resumable` lengths; what was kept of longer ones is dropped."""
        self.settle()
        if sequence >= len(self.lengths):
            return
        kept = [s for s in self.snapshots[sequence] if s.length <= length]
        self.snapshots[sequence] = kept
        if self.lengths[sequence] == length:
            return
        if length == 0:
            self.conv_LSWC[:, sequence] = 0
            self.state_LSHKV[:, sequence] = 0
        else:
            self.conv_LSWC[:, sequence] = kept[-1].conv_LWC
            self.state_LSHKV[:, sequence] = kept[-1].state_LHKV
        self.lengths[sequence] = length

    def _grow(self, num_sequences: int) -> None:
        missing = num_sequences - len(self.lengths)
        if missing <= 0:
            return
        for name in ("conv_LSWC", "state_LSHKV"):
            old = getattr(self, name)
            more = old.new_zeros((len(old), missing, *old.shape[2:]))
            setattr(self, name, torch.cat([old, more], dim=1))
        self.lengths += [0] * missing
        self.snapshots += [[] for _ in range(missing)]

    @property
    def num_bytes(self) -> int:
        """Committed state and snapshots."""
        kept = [tensor for row in self.snapshots for snapshot in row for tensor in snapshot[1:]]
        return sum(t.numel() * t.element_size() for t in (self.conv_LSWC, self.state_LSHKV, *kept))
