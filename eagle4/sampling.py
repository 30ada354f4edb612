"""From raw logits to the scores that are drawn from: one definition for plain and speculative.

Transformers' own processors, in Transformers' own order, see every tree node with that node's
ancestors as history. Greedy decoding takes the argmax of the processed float32 scores.
"""

from __future__ import annotations

import copy

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)

_PER_ROW = (EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor)


def for_sequence(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList:
    """The processors as row ``row`` of a batch of ``batch`` meets them when processed alone.

    Whatever may look at the batch index or hold one value per row is shown a whole batch; the
    rest of Transformers' own is row by row anyway and shared as it is.
    """
    return LogitsProcessorList(_row_view(processor, row, batch) for processor in processors)


def _row_view(processor: LogitsProcessor, row: int, batch: int) -> LogitsProcessor:
    if batch == 1:
        return processor
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
    if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
        return copy.deepcopy(processor)  # its state follows the tokens of one row
    per_row = isinstance(processor, _PER_ROW) or not _is_from_transformers(processor)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        per_row |= isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    return _InBatch(processor, row, batch) if per_row else processor


def _is_from_transformers(processor: LogitsProcessor) -> bool:
    return type(processor).__module__.startswith("transformers.")


class _InBatch(LogitsProcessor):
    """Shows a processor one row at its place in a batch, repeated to the batch's size."""

    def __init__(self, processor: LogitsProcessor, row: int, batch: int):
        self.processor, self.row, self.batch = processor, row, batch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids, rows = input_ids.expand(self.batch, -1), scores.repeat(self.batch, 1)
        return self.processor(ids, rows)[self.row : self.row + 1]  # type: ignore[arg-type]


def process_path(
    processors: LogitsProcessorList,
    logits_RV: torch.Tensor,
    history_T: torch.Tensor,
    token_N: torch.Tensor,
    parent_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Processed float32 scores ``[R, V]`` and greedy choices ``[R]`` of one sequence's rows.

    ``logits_RV`` has the root in row 0 and node i in row i + 1; ``history_T`` are the ids that
    plain decoding would show the processors, root included. From the root the walk follows the
    chosen token, so processors are called with the histories of plain decoding and no others:
    stateful ones keep their state, and constraints never meet a prefix that they forbid. Rows that
    the walk does not reach keep raw scores and choice -1, which verification never accepts.
    """
    scores_RV = logits_RV.to(dtype=torch.float32, copy=True)
    if not processors:
        return scores_RV, scores_RV.argmax(dim=-1)
    choice_R = torch.full_like(scores_RV[:, 0], -1, dtype=torch.int64)
    rows = torch.zeros(1, dtype=torch.int64, device=token_N.device)
    history_T = history_T.unsqueeze(0)
    while len(rows):
        try:
            scores_RV[rows] = processors(history_T, scores_RV[rows[:1]])  # type: ignore[arg-type]
        except Exception:
            # Below the root plain decoding might have stopped before it asked. The token is still
            # committed, as the bonus; if decoding goes on, the next round asks again at its root.
            if int(rows[0]) == 0:
                raise
            break
        choice = scores_RV[rows[0]].argmax()
        choice_R[rows] = choice
        history_T = torch.cat([history_T, choice.view(1, 1)], dim=1)
        # Siblings with the same token are one path here: verification takes the deeper one.
        is_next_N = torch.isin(parent_N + 1, rows) & (token_N == choice)
        rows = is_next_N.nonzero().squeeze(1) + 1
    return scores_RV, choice_R
