"""From raw logits to the scores that are drawn from: one definition for plain and speculative.

Transformers' own processors, in Transformers' own order, are applied to every tree node with that
node's ancestors as history. Greedy decoding takes the argmax of the processed float32 scores.
"""

from __future__ import annotations

import copy

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)


def for_sequence(processors: LogitsProcessorList, sequence: int) -> LogitsProcessorList:
    """The processors as row ``sequence`` of the batch sees them when it is processed alone.

    A few processors look at the batch index or hold one value per batch row; everything else is
    shared as it is.
    """
    return LogitsProcessorList(_row_view(processor, sequence) for processor in processors)


def _row_view(processor: LogitsProcessor, sequence: int) -> LogitsProcessor:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(sequence, ids), num_beams=1)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, torch.Tensor) and ignored.ndim and ignored.shape[0] > sequence:
            view = copy.copy(processor)
            view.prompt_ignore_length = int(ignored[sequence])
            return view
    return processor


def process_rows(
    processors: LogitsProcessorList,
    logits_RV: torch.Tensor,
    history_T: torch.Tensor,
    token_N: torch.Tensor,
    depth_N: torch.Tensor,
    ancestors_NN: torch.Tensor,
) -> torch.Tensor:
    """Processed float32 scores of the root row and every node row of one sequence.

    ``logits_RV`` has the root in row 0 and node i in row i + 1; ``history_T`` are the committed
    ids up to and including the root, padding on the left as the caller passed it. Rows of equal
    depth have histories of equal length and go through the processors together.
    """
    if not processors:
        return logits_RV.float()
    scores_RV = logits_RV.to(dtype=torch.float32, copy=True)
    scores_RV[:1] = processors(history_T.unsqueeze(0), scores_RV[:1].clone())
    for depth in range(1, int(depth_N.max()) + 1 if len(depth_N) else 1):
        nodes = (depth_N == depth).nonzero().squeeze(1)
        # Ancestors and self in index order are in depth order: parents come before children.
        paths = token_N[ancestors_NN[nodes].nonzero()[:, 1].view(len(nodes), depth)]
        histories = torch.cat([history_T.expand(len(nodes), -1), paths], dim=1)
        scores_RV[nodes + 1] = processors(histories, scores_RV[nodes + 1])
    return scores_RV
