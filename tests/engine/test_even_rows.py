"""Catches: added rows without room in the pools, rows of one sequence taken for another's, added
rows among the results, padding where nothing is replayed."""

from __future__ import annotations

import pytest
import torch
from replaying import CpuRecorder

from eagle4.cache import Window
from eagle4.engine.even_rows import pack
from eagle4.engine.graphs import EAGER, Graphs
from eagle4.engine.replay import Replays
from eagle4.engine.state import State


def chains(counts: list[int], prefix: int) -> list[Window]:
    return [
        Window(b, prefix, 0, torch.arange(prefix, prefix + n), torch.ones(n, n).bool().tril())
        for b, n in enumerate(counts)
    ]


def tokens(counts: list[int]) -> list[torch.Tensor]:
    return [100 * (b + 1) + torch.arange(n) for b, n in enumerate(counts)]


def state_of(graphs: Graphs, batch: int) -> State:
    state = State(torch.ones(batch, 61, dtype=torch.int64), [0] * batch, 0, graphs=graphs)
    for sequence in state.sequences:
        state.reserve(sequence, 64)
    return state


@pytest.mark.parametrize("counts", [[4], [4, 2], [1, 5, 3], [2, 2]], ids=str)
def test_added_rows_have_room_and_are_left_out(counts):
    state = state_of(Graphs(replays=Replays(CpuRecorder())), len(counts))
    rows = pack(state, chains(counts, 60), tokens(counts))
    most = {4: 5, 5: 5, 2: 2}[max(counts)]
    (token_R,) = rows.columns
    assert [len(window.visible) for window in rows.windows] == [most] * len(counts)
    assert len(token_R) == most * len(counts)
    assert token_R[rows.first].tolist() == [100 * (b + 1) for b in range(len(counts))]
    own = token_R if rows.own_R is None else token_R[rows.own_R]
    assert own.tolist() == torch.cat(tokens(counts)).tolist()
    assert (rows.own_R is None) == (counts == [2, 2])
    # Every added row has a slot of its own.
    assert len(set(state.step(rows.windows).slot_R.tolist())) == len(token_R)


@pytest.mark.parametrize("how", ["direct", "not even", "many"])
def test_rows_as_they_are(how):
    graphs = EAGER if how == "direct" else Graphs(replays=Replays(CpuRecorder()))
    counts = [80, 2] if how == "many" else [4, 2]
    state = state_of(graphs, 2)
    windows = chains(counts, 0)
    rows = pack(state, windows, tokens(counts), is_even=how != "not even")
    assert rows.windows is windows and rows.own_R is None and rows.first == [0, counts[0]]
    assert torch.equal(rows.columns[0], torch.cat(tokens(counts)))
