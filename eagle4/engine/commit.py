"""Commit a verdict: stop rules token by token, then caches, features and outputs.

The one place where tokens become final. Stopping is decided before anything is streamed or kept,
so ids, scores, streamed text and statistics cannot disagree.
"""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList

from .state import Sequence, State


def commit_tokens(
    state: State,
    sequence: Sequence,
    tokens: list[int],
    criteria: StoppingCriteriaList,
    scores: list[torch.Tensor] | None,
    score_rows: torch.Tensor | None,
) -> int:
    """Append tokens one by one until a criterion fires; returns how many were kept (at least 1).

    ``score_rows [len(tokens), V]`` are appended to ``scores`` in step, so a criterion that reads
    scores sees one entry per token. Criteria are shown the row at its place in a batch, repeated
    to the batch's size: they may hold one limit per row.
    """
    batch = len(state.sequences)
    for kept, token in enumerate(tokens, start=1):
        state.append(sequence, token)
        seen = None
        if scores is not None and score_rows is not None:
            scores.append(score_rows[kept - 1].expand(batch, -1))
            seen = tuple(scores)
        ids = state.history(sequence).expand(batch, -1)
        if bool(criteria(ids, seen)[sequence.index]):  # type: ignore[arg-type]
            sequence.done = True
            return kept
    return len(tokens)


def commit_cache(
    state: State, sequence: Sequence, rows: list[int], features_RTH: torch.Tensor | None
) -> None:
    """Keep the K/V and the taps of the accepted rows.

    ``rows`` are window indices in path order (0 is the root); the path moves to the front of the
    window, so the cache is laid out as plain decoding would have left it.
    """
    moved = [(old, new) for new, old in enumerate(rows) if old != new]
    if moved:
        slot = state.table.slot
        first = sequence.kv_length
        source = [slot(sequence.index, first + old) for old, _ in moved]
        target = [slot(sequence.index, first + new) for _, new in moved]
        state.target_pool.move(
            torch.tensor(source, device=state.device), torch.tensor(target, device=state.device)
        )
    sequence.kv_length += len(rows)
    if features_RTH is not None:
        sequence.pending.append(features_RTH)
