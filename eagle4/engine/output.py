"""What leaves the engine while and after it runs: streamed tokens, scores, hidden states."""

from __future__ import annotations

import torch

from .state import Sequence, State


class Streamer:
    """Feeds a Transformers streamer one step at a time, as plain decoding would.

    Step s is put as ``(B,)`` ids once every row has its s-th token; rows that have finished give
    the padding token.
    """

    def __init__(self, streamer, state: State, pads_finished: bool):
        self.streamer = streamer
        self.state = state
        self.pads_finished = pads_finished
        self.step = 0

    def flush(self) -> None:
        """Put every step that is complete."""
        if self.streamer is None:
            return
        rows = self.state.sequences
        waiting = [s.new_tokens for s in rows if not (s.done and self.pads_finished)]
        ready = min(waiting) if waiting else max(s.new_tokens for s in rows)
        while self.step < ready:
            tokens = [self._token(sequence) for sequence in rows]
            self.streamer.put(torch.tensor(tokens))
            self.step += 1

    def _token(self, sequence: Sequence) -> int:
        if self.step >= sequence.new_tokens:
            return self.state.pad_token
        column = self.state.prompt_length + self.step
        return int(self.state.host_ids_BT[sequence.index, column])


class Recorder:
    """Per-token outputs of `return_dict_in_generate`, one entry per committed token and row."""

    def __init__(self, state: State, scores: bool, logits: bool, hidden_states: bool):
        batch = range(len(state.sequences))
        self.state = state
        self.scores: list[list[torch.Tensor]] | None = [[] for _ in batch] if scores else None
        self.logits: list[list[torch.Tensor]] | None = [[] for _ in batch] if logits else None
        # Per row, per step: every layer's [rows, H]; step 0 holds the prompt.
        self.hidden: list[list[tuple[torch.Tensor, ...]]] | None = (
            [[] for _ in batch] if hidden_states else None
        )

    def add_prompt(self, sequence: Sequence, chunks: list[tuple[torch.Tensor, ...]]) -> None:
        """Hidden states of the prompt rows that were run, chunk by chunk; zeros for padding."""
        if self.hidden is not None and chunks:
            layers = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
            from_start = len(layers[0]) == sequence.length
            padding = sequence.pad if from_start else 0
            self.hidden[sequence.index].append(
                tuple(torch.cat([rows.new_zeros(padding, rows.shape[1]), rows]) for rows in layers)
            )

    def add_rows(
        self,
        sequence: Sequence,
        rows: torch.Tensor,
        logits_RV: torch.Tensor,
        hidden_states: tuple[torch.Tensor, ...] | None,
    ) -> None:
        """Raw logits and hidden states of the packed rows that produced the kept tokens."""
        if self.logits is not None:
            self.logits[sequence.index] += logits_RV[rows].float().split(1)
        if self.hidden is not None and hidden_states is not None:
            for row in rows.tolist():
                layers = tuple(layer[row : row + 1] for layer in hidden_states)
                self.hidden[sequence.index].append(layers)

    def stacked(self, rows: list[list[torch.Tensor]] | None) -> tuple[torch.Tensor, ...] | None:
        """Per-step ``(B, V)`` of entries ``(1 or B, V)``; a finished row repeats its last entry."""
        if rows is None:
            return None
        steps = max(len(row) for row in rows)
        return tuple(
            torch.cat([row[min(step, len(row) - 1)][:1] for row in rows]) for step in range(steps)
        )

    def stacked_hidden(self) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """Per-step tuples of ``(B, rows, H)``: the whole prompt first, then one row a step."""
        if self.hidden is None:
            return None
        steps = max(len(row) for row in self.hidden)
        layers = range(len(self.hidden[0][0]))
        return tuple(tuple(self._batched(step, layer) for layer in layers) for step in range(steps))

    def _batched(self, step: int, layer: int) -> torch.Tensor:
        assert self.hidden is not None
        rows = [row[min(step, len(row) - 1)][layer] for row in self.hidden]
        longest = max(len(row) for row in rows) if step == 0 else 1
        rows = [row[-longest:] for row in rows]
        return torch.stack(
            [torch.cat([row.new_zeros(longest - len(row), row.shape[1]), row]) for row in rows]
        )
