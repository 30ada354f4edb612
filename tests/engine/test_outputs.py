"""Catches: scores, logits and hidden states with an entry too many, too few, in the wrong order or
from a rejected node (R2, D4); raw logits changed by processors; padding columns mixed into a row;
statistics that contradict the text (R1, J12, J8).
"""

from __future__ import annotations

import pytest
import torch
from scripted import Liar, Oracle, ScriptedModel, continuations, small_drafter

from eagle4 import Eagle4ForCausalLM
from eagle4.engine import SpeculationStats
from tests.engine.compare import (
    DRAFTERS,
    VOCAB,
    count_target_rows,
    eagle,
    model_with,
    plain,
    prompt,
    shared_target,
)

NEW = 12
EVERYTHING = dict(
    return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True
)
TOLERANCE = dict(rtol=1e-4, atol=2e-5)


def live_steps(sequences: torch.Tensor, prompt_length: int, eos: list[int]) -> list[int]:
    """Tokens of every row up to and including its EOS."""
    ends = []
    for row in sequences[:, prompt_length:].tolist():
        stops = [i for i, token in enumerate(row) if token in eos]
        ends.append(stops[0] + 1 if stops else len(row))
    return ends


def assert_outputs_equal(got, wanted, inputs, eos: list[int]) -> None:
    """Same shapes and counts; same values wherever a row was still running and is not padding."""
    assert got.sequences.tolist() == wanted.sequences.tolist()
    length = inputs["input_ids"].shape[1]
    steps = got.sequences.shape[1] - length
    ends = live_steps(wanted.sequences, length, eos)
    for name in ("scores", "logits"):
        mine, theirs = getattr(got, name), getattr(wanted, name)
        assert isinstance(mine, tuple) and len(mine) == len(theirs) == steps
        for step in range(steps):
            assert mine[step].shape == theirs[step].shape
            assert mine[step].dtype == theirs[step].dtype == torch.float32
            rows = [row for row, end in enumerate(ends) if step < end]
            torch.testing.assert_close(mine[step][rows], theirs[step][rows], **TOLERANCE)
    assert len(got.hidden_states) == len(wanted.hidden_states) == steps
    kept = inputs["attention_mask"].bool()
    for step, (mine, theirs) in enumerate(
        zip(got.hidden_states, wanted.hidden_states, strict=True)
    ):
        assert len(mine) == len(theirs)
        rows = [row for row, end in enumerate(ends) if step < end]
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape == b.shape
            if step == 0:
                torch.testing.assert_close(a[kept], b[kept], **TOLERANCE)
            else:
                torch.testing.assert_close(a[rows], b[rows], **TOLERANCE)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("lengths", [[5], [6, 1, 4]])
def test_scores_logits_and_hidden_states_equal_plain(lengths, drafter):
    inputs = prompt(lengths, extra=2)
    model = model_with(drafter, shared_target(), inputs)
    kwargs = dict(max_new_tokens=NEW, **EVERYTHING)
    wanted = plain(model, inputs, **kwargs)
    assert_outputs_equal(eagle(model, inputs, **kwargs), wanted, inputs, [])
    assert_outputs_equal(eagle(model, inputs, **kwargs, speculative=None), wanted, inputs, [])


@pytest.mark.parametrize("drafter", ["oracle", "mixed"])
def test_outputs_of_a_block_that_is_cut_by_eos(drafter):
    inputs = prompt([6, 1, 4])
    model = model_with(drafter, shared_target(), inputs)
    produced = plain(model, inputs, max_new_tokens=NEW)[:, 6:]
    for n in (0, 3, 7):
        eos = [int(produced[0, n]), int(produced[1, (n + 4) % NEW]), int(produced[2, 2])]
        kwargs = dict(max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0, **EVERYTHING)
        assert_outputs_equal(
            eagle(model, inputs, **kwargs), plain(model, inputs, **kwargs), inputs, eos
        )


def test_scores_are_processed_and_logits_are_raw():
    inputs = prompt([6, 3])
    rules = dict(repetition_penalty=1.5, suppress_tokens=[4, 5], bad_words_ids=[[7, 8], [9]])
    for drafter in ("oracle", "random"):
        model = model_with(drafter, shared_target(), inputs, NEW, **rules)
        kwargs = dict(max_new_tokens=NEW, **rules, **EVERYTHING)
        got = eagle(model, inputs, **kwargs)
        assert_outputs_equal(got, plain(model, inputs, **kwargs), inputs, [])
        assert all((step[:, 4] == -torch.inf).all() for step in got.scores)
        assert all(torch.isfinite(step).all() for step in got.logits)


def test_nothing_is_returned_that_was_not_asked_for():
    inputs = prompt([5])
    model = model_with("oracle", shared_target(), inputs)
    out = eagle(model, inputs, max_new_tokens=5, return_dict_in_generate=True)
    assert out.scores is None and out.logits is None and out.hidden_states is None
    assert out.past_key_values is not None
    # Asked for without the dict: Transformers returns plain ids.
    out = eagle(model, inputs, max_new_tokens=5, output_scores=True, output_hidden_states=True)
    assert isinstance(out, torch.Tensor)


# -- statistics ------------------------------------------------------------------------------------


def assert_consistent(stats: SpeculationStats, rows: int, new_tokens: int) -> None:
    speculative = stats.rounds - stats.plain_rounds
    assert stats.rounds == len(stats.accepted_per_round)
    assert stats.new_tokens == new_tokens
    assert all(0 <= rate <= 1 for rate in stats.acceptance_by_depth)
    assert 0 <= stats.plain_rounds <= stats.rounds
    entries = sum(len(row) for row in stats.accepted_per_round)
    accepted = sum(map(sum, stats.accepted_per_round))
    # Every entry commits what it accepted and a bonus, unless a stop cut the block.
    committed = new_tokens - rows
    assert accepted <= committed <= accepted + entries
    if speculative == stats.rounds and stats.rounds:
        assert stats.accept_length == pytest.approx(committed / entries)
    assert stats.nodes_verified >= accepted
    assert stats.to_dict()["accept_length"] == stats.accept_length


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("eos", [False, True])
def test_statistics_agree_with_the_text(monkeypatch, drafter, eos):
    inputs = prompt([6, 2, 4])
    target = shared_target()
    model = model_with(drafter, target, inputs)
    produced = plain(model, inputs, max_new_tokens=NEW)[:, 6:]
    ends = [int(produced[0, 5]), int(produced[2, 2])] if eos else []
    rows = count_target_rows(monkeypatch)
    kwargs = dict(return_dict_in_generate=True, max_new_tokens=NEW, pad_token_id=0)
    out = eagle(model, inputs, **kwargs, eos_token_id=ends or None)
    stats = out.speculation
    assert stats is model.last_speculation
    new = sum(live_steps(out.sequences, 6, ends))
    assert_consistent(stats, 3, new)
    assert stats.target_calls == len(rows) == stats.rounds + 3
    # Every live row brings its root; every verified node one more row.
    roots = sum(len(entry) for entry in stats.accepted_per_round)
    assert sum(rows) == (6 + 2 + 4) + roots + stats.nodes_verified


def test_accept_length_of_oracle_and_liar():
    inputs = prompt([5])
    target = shared_target()
    known = continuations(target, inputs, max_new_tokens=60)
    config = {"max_depth": 4, "top_k": 2, "max_nodes": 16}
    model = ScriptedModel(target, Oracle(known, VOCAB))
    eagle(model, inputs, max_new_tokens=1 + 5 * 5, speculative=config)
    stats = model.last_speculation
    # Depth 4 all right: 4 nodes and the bonus in every round.
    assert stats.accept_length == 5 and stats.rounds == 5
    assert stats.acceptance_by_depth == [1.0] * 4
    model = ScriptedModel(target, Liar(known, VOCAB))
    eagle(model, inputs, max_new_tokens=9, speculative=config)
    stats = model.last_speculation
    assert stats.accept_length == 1.0
    assert stats.rounds == 8 and set(stats.acceptance_by_depth) == {0.0}


def test_plain_decoding_reports_plain_rounds():
    inputs = prompt([5])
    model = Eagle4ForCausalLM(shared_target(), small_drafter(shared_target()))
    eagle(model, inputs, max_new_tokens=7, speculative=None)
    stats = model.last_speculation
    assert stats.rounds == stats.plain_rounds == 6 and stats.target_calls == 7
    assert stats.draft_calls == stats.nodes_drafted == stats.nodes_verified == 0
    assert stats.accept_length == 1.0 and stats.acceptance_by_depth == []


def test_statistics_belong_to_one_call():
    inputs = prompt([5])
    model = model_with("oracle", shared_target(), inputs)
    eagle(model, inputs, max_new_tokens=9)
    first = model.last_speculation
    eagle(model, inputs, max_new_tokens=9)
    second = model.last_speculation
    assert first is not second and first.to_dict()["rounds"] == second.to_dict()["rounds"]
    model.generate(**inputs, max_new_tokens=3, num_beams=2)
    assert model.last_speculation is None, "this call did not run on the engine"
