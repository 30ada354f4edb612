"""From raw logits to the law that is drawn from: one definition for plain and speculative, p and q.

p: Transformers' own processors and warpers, in Transformers' own order, see every tree node with
that node's ancestors as history. Greedy decoding takes the argmax of the processed float32 scores;
sampling draws from their softmax with counter-based Gumbel noise.
q: the drafter's law over its candidates under the context-free warpers of the same call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor

from .noise import gumbel
from .types import Candidates

_PER_ROW = (
    hf.EncoderNoRepeatNGramLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
)
# Row by row, whatever the history and whatever the columns are.
_CONTEXT_FREE = (
    *(hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper),
    *(hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.TopHLogitsWarper),
)

Choose = Callable[[int, int, torch.Tensor], torch.Tensor]
"""``(row, depth, processed scores [V])`` to the token that follows the row, a 0-d tensor."""


def for_sequence(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList:
    """The processors as row ``row`` of a batch of ``batch`` meets them when processed alone.

    Whatever may look at the batch index or hold one value per row is shown a whole batch; the
    rest of Transformers' own is row by row anyway and shared as it is.

    The contract for a user's processor: it is called once per committed token with the histories
    of plain decoding, so in a batch of one it may keep state. In a larger batch rows are processed
    one at a time, each at its own pace; a processor that keeps state over calls then has to say so
    with ``is_stateful = True`` and gets one copy per row. (So it need not fall back to plain
    decoding: the walk of `process_path` never calls it for a token that is not committed.)
    """
    return LogitsProcessorList(_row_view(processor, row, batch) for processor in processors)


def _row_view(processor: LogitsProcessor, row: int, batch: int) -> LogitsProcessor:
    if batch == 1:
        return processor
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
    if isinstance(processor, hf.SynthIDTextWatermarkLogitsProcessor):
        return copy.deepcopy(processor)  # its state follows the tokens of one row
    if getattr(processor, "is_stateful", False):
        processor = copy.deepcopy(processor)
    per_row = isinstance(processor, _PER_ROW) or not _is_from_transformers(processor)
    if isinstance(processor, hf.RepetitionPenaltyLogitsProcessor):
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


def process_row(
    processors: LogitsProcessorList, history_1T: torch.Tensor, score_1V: torch.Tensor
) -> torch.Tensor:
    """Processed scores ``[1, V]`` of one row.

    A result of another shape fails as it fails in Transformers; fewer columns are served there and
    here: the missing tokens cannot be chosen.
    """
    found = processors(history_1T, score_1V)  # type: ignore[arg-type]
    if isinstance(found, torch.Tensor) and found.shape == score_1V.shape:
        return found
    if isinstance(found, torch.Tensor) and found.ndim == 2 and len(found) == 1:
        missing = score_1V.shape[1] - found.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(found, (0, missing), value=float("-inf"))
    torch.cat([history_1T, torch.argmax(found, dim=-1)[:, None]], dim=-1)
    raise RuntimeError(f"processed scores have shape {tuple(found.shape)}, not (1, vocabulary)")


def process_path(
    processors: LogitsProcessorList,
    logits_RV: torch.Tensor,
    history_T: torch.Tensor,
    token_N: torch.Tensor,
    parent_N: torch.Tensor,
    choose: Choose | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Processed float32 scores ``[R, V]`` and chosen tokens ``[R]`` of one sequence's rows.

    ``logits_RV`` has the root in row 0 and node i in row i + 1; ``history_T`` are the ids that
    plain decoding would show the processors, root included; ``choose`` picks the token behind a
    row, the argmax by default. From the root the walk follows the chosen token, so processors are
    called with the histories of plain decoding and no others: stateful ones keep their state, and
    constraints never meet a prefix that they forbid. Rows that the walk does not reach keep raw
    scores and choice -1, which verification never accepts.
    """
    scores_RV = logits_RV.to(dtype=torch.float32, copy=True)
    if not processors and choose is None:
        return scores_RV, scores_RV.argmax(dim=-1)
    choice_R = torch.full((len(scores_RV),), -1, dtype=torch.int64, device=scores_RV.device)
    rows = torch.zeros(1, dtype=torch.int64, device=token_N.device)
    history_1T, depth = history_T.unsqueeze(0), 0
    while len(rows):
        try:
            scores_RV[rows] = process_row(processors, history_1T, scores_RV[rows[:1]])
            score_V = scores_RV[rows[0]]
            choice = score_V.argmax() if choose is None else choose(int(rows[0]), depth, score_V)
        except Exception:
            # Below the root plain decoding might have stopped before it asked. The token is still
            # committed, as the bonus; if decoding goes on, the next round asks again at its root.
            if depth == 0:
                raise
            break
        choice_R[rows] = choice
        history_1T = torch.cat([history_1T, choice.view(1, 1)], dim=1)
        # Siblings with the same token are one path here: verification takes the deeper one.
        is_next_N = torch.isin(parent_N + 1, rows) & (token_N == choice)
        rows, depth = is_next_N.nonzero().squeeze(1) + 1, depth + 1
    return scores_RV, choice_R


def support(score_V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[S]`` that the law of these scores allows, ascending, and their float64 scores.

    Scores that are no law (NaN, infinite, nothing left) raise what `torch.multinomial` raises.
    """
    check_law(score_V.max())
    token_S = (score_V > float("-inf")).nonzero().squeeze(1)
    return token_S, score_V[token_S].double()


def check_law(best: torch.Tensor) -> None:
    """Raise `RuntimeError`, as `torch.multinomial` does, unless the best score is finite."""
    if not torch.isfinite(best):
        torch.multinomial(best.view(1).softmax(dim=-1), num_samples=1)
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")


def draw(score_S: torch.Tensor, token_S: torch.Tensor, key: int) -> torch.Tensor:
    """One token from ``softmax(score_S)`` with the noise of ``key``: argmax(log p + g)."""
    return token_S[(score_S + gumbel(key, token_S)).argmax()]


def context_free(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those processors that may be applied to a few candidates without their history."""
    return LogitsProcessorList(p for p in processors if type(p) in _CONTEXT_FREE)


def draft_law(warpers: LogitsProcessorList, candidates: Candidates) -> Candidates:
    """q: the drafter's candidates under the call's warpers, float64 log-probabilities.

    The one law of a drafted token: it is drawn from, divided by and subtracted. -inf marks a
    candidate that the warpers removed.
    """
    score_RC = candidates.logp_RK
    for warper in warpers:
        score_RC = warper(candidates.token_RK, score_RC)  # type: ignore[arg-type]
    return candidates._replace(logp_RK=score_RC.double().log_softmax(dim=-1))
