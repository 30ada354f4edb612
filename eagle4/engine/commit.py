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
    scores sees one entry per token.
    """
    batch = len(state.sequences)
    for kept, token in enumerate(tokens, start=1):
        state.append(sequence, token)
        seen = None
        if scores is not None and score_rows is not None:
            scores.append(score_rows[kept - 1].expand(batch, -1))
            seen = tuple(scores)
        if _stops(criteria, state, sequence, seen, batch):
            sequence.done = True
            return kept
    return len(tokens)


def _stops(
    criteria: StoppingCriteriaList,
    state: State,
    sequence: Sequence,
    scores: tuple[torch.Tensor, ...] | None,
    batch: int,
) -> bool:
    """Whether any criterion stops the row; all are asked, as in Transformers.

    A user's criterion is shown the row at its place in a batch, repeated to the batch's size: it
    may hold one limit per row. Transformers' own judge every row alike, so one is enough, and they
    judge on the CPU: a question per token must not wait for a device.
    """
    row = sequence.index
    own = [type(c).__module__.startswith("transformers.") for c in criteria]
    fired = False
    for rows, is_own in ((1, True), (batch, False)):
        chosen = StoppingCriteriaList(
            c for c, mine in zip(criteria, own, strict=True) if mine is is_own
        )
        if chosen:
            ids_T = state.history_on_host(sequence) if is_own else state.history(sequence)
            answer = chosen(ids_T.expand(rows, -1), scores)  # type: ignore[arg-type]
            fired |= bool(answer[0 if is_own else row].any())
    return fired


def commit_cache(
    state: State, sequence: Sequence, rows: list[int], features_RTH: torch.Tensor | None
) -> None:
    """Keep the K/V and the taps of the accepted rows.

    ``rows`` are window indices in path order (0 is the root); the path moves to the front of the
    window, so the cache is laid out as plain decoding would have left it. Recurrent layers take
    the path in as well.
    """
    if state.target_pool.recurrent is not None:
        state.target_pool.recurrent.commit(sequence.index, rows)
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
        sequence.keep(features_RTH)
