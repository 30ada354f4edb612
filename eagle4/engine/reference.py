"""One round in readable eager PyTorch: the specification that compiled rounds are compared with.

prefill:  prompt rows -> target -> first token
round:    draft tree -> target verifies root + nodes in one packed forward -> verdict -> commit

A plain round is the same code with an empty tree: one row per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import LogitsProcessorList

from ..cache import Window, build_step
from ..target import TargetAdapter, TargetOutput
from ..tree import ancestor_matrix
from ..types import Law, Tree, Verdict
from ..verify import verify_greedy
from .choices import choose_tokens
from .even_rows import pack
from .state import Sequence, State

PREFILL_CHUNK = 512


class Verified(NamedTuple):
    """A verified round, before anything is committed. Rows are packed, root first per sequence."""

    verdict: Verdict
    first_row: list[int]  # packed row of every sequence's root
    scores: list[torch.Tensor]  # per sequence: float32 scores of root and nodes, see process_path
    output: TargetOutput


def empty_tree(batch: int, device: torch.device) -> Tree:
    """No nodes: verification of the root alone."""
    none = torch.zeros(batch, 0, dtype=torch.int64, device=device)
    return Tree(none, none, none, none.float(), none.sum(dim=1))


def prefill(
    state: State, sequence: Sequence, target: TargetAdapter, all_hidden_states: bool
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]], int]:
    """Run the uncached prompt of one sequence in chunks.

    Returns the last row's logits ``[1, V]``, the hidden states of every chunk when asked, and the
    number of target forwards.
    """
    ids = state.tokens(sequence)
    state.reserve(sequence, sequence.length)
    hidden, calls, logits = [], 0, None
    while sequence.kv_length < sequence.length:
        start = sequence.kv_length
        stop = min(start + PREFILL_CHUNK, sequence.length)
        position = torch.arange(start, stop, device=state.device)
        visible = torch.ones(stop - start, stop - start, dtype=torch.bool, device=state.device)
        window = Window(sequence.index, start, 0, position, visible.tril())
        step = build_step(state.table, [window], state.device, is_prompt=True)
        last = torch.tensor([stop - start - 1], device=state.device)
        out = target.forward(ids[start:stop], step, state.target_pool, last, all_hidden_states)
        calls += 1
        logits = out.logits_RV
        if out.features_RTH is not None:
            sequence.keep(out.features_RTH)
        if out.hidden_states is not None:
            hidden.append(out.hidden_states)
        sequence.kv_length = stop
    assert logits is not None, "a prompt always leaves one row to run"
    return logits, hidden, calls


def verify(
    state: State,
    sequences: list[Sequence],
    tree: Tree,
    target: TargetAdapter,
    processors: list[LogitsProcessorList],
    all_hidden_states: bool = False,
    law: Law | None = None,
    counts: list[int] | None = None,
) -> Verified:
    """Run root and nodes of every sequence through the target and walk the tree.

    The walk follows the target's own tokens: the argmax, or what the call's sampler draws. ``law``
    belongs to a tree whose nodes were drawn; ``counts`` are its nodes, where the host knows them.
    """
    counts = tree.count_B.tolist() if counts is None else counts
    ancestors_BNN = ancestor_matrix(tree.parent_BN)
    windows, tokens = [], []
    for b, sequence in enumerate(sequences):
        count = counts[b]
        state.reserve(sequence, sequence.length + count)
        tokens.append(torch.cat([state.tokens(sequence)[-1:], tree.token_BN[b, :count]]))
        windows.append(_tree_window(sequence, tree, ancestors_BNN, b, count))
    output = _forward(state, windows, tokens, target, all_hidden_states)
    first_row, row = [], 0
    for count in counts:
        first_row.append(row)
        row += count + 1
    logits_RV = output.logits_RV
    chosen = choose_tokens(state, sequences, tree, law, processors, logits_RV, counts, target.vocab)
    output = output._replace(logits_RV=chosen.logits_RV)
    verdict = verify_greedy(tree, ancestors_BNN, chosen.choice_BR)
    return Verified(verdict, first_row, chosen.scores, output)


def _forward(
    state: State,
    windows: list[Window],
    tokens: list[torch.Tensor],
    target: TargetAdapter,
    all_hidden_states: bool,
) -> TargetOutput:
    """The target on packed rows, the windows' own alone."""
    # Recurrent layers would take added rows for tokens.
    rows = pack(state, windows, tokens, is_even=not target.mixers)
    place = state.step(rows.windows), state.target_pool
    output = state.graphs.forward(target, rows.columns[0], *place, all_hidden_states)
    if rows.own_R is None:
        return output
    logits_RV, features_RTH, hidden = output
    features_RTH = None if features_RTH is None else features_RTH[rows.own_R]
    hidden = None if hidden is None else tuple(layer[rows.own_R] for layer in hidden)
    return TargetOutput(logits_RV[rows.own_R], features_RTH, hidden)


def _tree_window(
    sequence: Sequence, tree: Tree, ancestors_BNN: torch.Tensor, b: int, count: int
) -> Window:
    root = sequence.length - 1
    device = tree.token_BN.device
    visible = torch.zeros(count + 1, count + 1, dtype=torch.bool, device=device)
    visible[:, 0] = True
    visible[1:, 1:] = ancestors_BNN[b, :count, :count]
    position = torch.cat([torch.tensor([root], device=device), root + tree.depth_BN[b, :count]])
    return Window(sequence.index, sequence.kv_length, 0, position, visible)
