"""Which token the target puts behind every verified row.

On one process that is a walk over whole rows of scores (`sampling.process_path`). Where ranks hold
parts of the rows, as little as the choice needs is exchanged first:

    greedy, coupled     one (score, id) pair per row and rank
    rejection           that, the candidates' scores and the mass of all other tokens
    top-k filters       the k best scores per row and rank
    anything else       whole rows, counted as such: other processors, scores that are asked for

Every rank then makes the same choice from the same bits, and takes rank 0's in the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from ..parallel import VocabShard
from ..sampling import process_path
from ..types import Drawn, Law, Tree
from .shared_rows import SharedRows
from .state import Sequence, State


class Chosen(NamedTuple):
    """Tokens behind the rows, and the rows that they were chosen from."""

    choice_BR: torch.Tensor  # int64, root first; -1 where the walk did not come by
    scores: list[torch.Tensor]  # per sequence: processed float32 rows; 0 columns when not shared
    logits_RV: torch.Tensor  # raw rows, whole if they were gathered


def choose_tokens(
    state: State,
    sequences: list[Sequence],
    tree: Tree,
    law: Law | None,
    processors: list[LogitsProcessorList],
    logits_RV: torch.Tensor,
    counts: list[int],
    vocab: VocabShard | None = None,
) -> Chosen:
    """Choose behind root and nodes of every sequence; rows are packed, root first.

    ``processors`` by row of the call; ``counts`` the nodes of every tree. ``vocab``: the logits are
    one rank's columns.
    """
    own = [processors[sequence.index] for sequence in sequences]
    shared = None
    if vocab is not None:
        vocab.ask(logits_RV)
        logits_RV, shared = _share(state, sequences, tree, law, own, logits_RV, vocab)
    shape = len(sequences), tree.token_BN.shape[1] + 1
    choice_BR = torch.full(shape, -1, dtype=torch.int64, device=state.device)
    drawn = None if law is None else Drawn(tree, law)
    scores, first = [], 0
    for b, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        rows = slice(first, first + count + 1)
        first += count + 1
        if shared is not None and state.sampler is None:
            scores_RV, choice_R = logits_RV[rows], shared.token_R[rows]
        else:
            scores_RV, choice_R = process_path(
                own[b] if shared is None else LogitsProcessorList(),
                logits_RV[rows],
                state.history(sequence),
                tree.token_BN[b, :count],
                tree.parent_BN[b, :count],
                None if state.sampler is None else state.sampler.choose(sequence, drawn, b, shared),
            )
        choice_BR[b, : count + 1] = choice_R
        scores.append(scores_RV)
    if vocab is not None:
        choice_BR = vocab.ranks.broadcast(choice_BR, "verify")
    return Chosen(choice_BR, scores, logits_RV)


def _share(
    state: State,
    sequences: list[Sequence],
    tree: Tree,
    law: Law | None,
    processors: list[LogitsProcessorList],
    logits_RV: torch.Tensor,
    vocab: VocabShard,
) -> tuple[torch.Tensor, SharedRows | None]:
    """Whole rows, or rows of no columns and what the ranks know about them together."""
    warpers = processors[0]  # of one kind in all rows of a call
    rest = [p for p in warpers if type(p) is not TemperatureLogitsWarper]
    if not state.needs_rows and not rest:
        rows = SharedRows(state, sequences, tree, law, warpers, logits_RV, vocab)
        return logits_RV[:, :0], rows
    is_top_k = not state.needs_rows and type(rest[0]) is TopKLogitsWarper
    return vocab.rows(logits_RV, rest[0].top_k if is_top_k else 0), None
