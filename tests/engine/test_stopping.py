"""Catches: a stop inside an accepted block that is overshot or missed (D1, D2, D6), text, ids and
scores that disagree about the end (D4), a budget overrun (B3), a missing EOS that crashes (B1),
rows of a batch that stop at each other's end, criteria shown the wrong tokens or scores.
"""

from __future__ import annotations

import time

import pytest
import torch
from scripted import Mixed, Oracle, ScriptedModel, continuations
from tiny import tiny_llama
from transformers import StoppingCriteria, StoppingCriteriaList

from tests.engine.compare import (
    DRAFTERS,
    VOCAB,
    assert_identical,
    eagle,
    model_with,
    piece_tokenizer,
    plain,
    prompt,
    shared_target,
)

LENGTHS, NEW = [6, 1, 4], 12
CONFIG = {"max_depth": 5, "top_k": 2, "max_nodes": 10}


def new_tokens(model, inputs, new: int = NEW) -> torch.Tensor:
    return plain(model, inputs, max_new_tokens=new)[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("drafter", ["oracle", "mixed", "random"])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_eos_at_every_depth_in_every_row(row, drafter):
    """Declare the row's n-th token to be EOS: it falls everywhere into an accepted block."""
    inputs = prompt(LENGTHS)
    model = model_with(drafter, shared_target(), inputs)
    produced = new_tokens(model, inputs)
    steps = range(NEW) if drafter == "oracle" else range(row, NEW, 3)
    for n in steps:
        eos = int(produced[row, n])
        kwargs = dict(max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0, speculative=CONFIG)
        assert_identical(model, inputs, **kwargs)


@pytest.mark.parametrize("drafter", ["oracle", "mixed"])
def test_several_eos_ids(drafter):
    inputs = prompt(LENGTHS)
    model = model_with(drafter, shared_target(), inputs)
    produced = new_tokens(model, inputs)
    for n in range(1, NEW, 2):
        eos = [int(produced[0, n]), int(produced[1, -n]), int(produced[2, 5])]
        assert_identical(model, inputs, max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0)


def test_eos_without_a_padding_token_uses_eos():
    inputs = prompt(LENGTHS)
    target = tiny_llama(vocab=VOCAB, layers=2, pad_token_id=None)
    model = model_with("oracle", target, inputs)
    eos = int(new_tokens(model, inputs)[0, 3])
    assert_identical(model, inputs, max_new_tokens=NEW, eos_token_id=eos)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_eos_at_all(drafter):
    inputs = prompt(LENGTHS)
    model = model_with(drafter, shared_target(), inputs)
    assert_identical(model, inputs, max_new_tokens=NEW, eos_token_id=None)


@pytest.mark.parametrize("minimum", [1, 4, 9])
def test_an_early_eos_waits_for_min_new_tokens(minimum):
    inputs = prompt(LENGTHS)
    target = shared_target()
    free = model_with("oracle", target, inputs)
    eos = int(new_tokens(free, inputs)[0, 1])
    rules = dict(eos_token_id=eos, pad_token_id=0, min_new_tokens=minimum)
    known = continuations(target, inputs, max_new_tokens=40, **{**rules, "min_new_tokens": 40})
    for draft in (Oracle(known, VOCAB), Mixed(known, VOCAB, [1, 2, 0])):
        draft = Lenient(draft)
        assert_identical(ScriptedModel(target, draft), inputs, max_new_tokens=NEW, **rules)


class Lenient:
    """A script that drafts only while the text follows its reference."""

    def __init__(self, script):
        self.script = script

    def __call__(self, state, sequences, plan, depth_limit, stats):
        for sequence in sequences:
            known = self.script.references[sequence.index]
            tokens = state.tokens(sequence).tolist()
            if known[: len(tokens)] != tokens:
                self.script.references[sequence.index] = tokens
        return self.script(state, sequences, plan, depth_limit, stats)


# -- stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["oracle", "mixed", "random"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_stop_strings_that_span_tokens(width, drafter):
    """The text of 1-3 tokens, ending at every depth; also one that begins and ends in a token."""
    tokenizer = piece_tokenizer()
    inputs = prompt([5])
    model = model_with(drafter, shared_target(), inputs)
    produced = new_tokens(model, inputs)[0].tolist()
    steps = range(width, NEW + 1) if drafter == "oracle" else range(width + 1, NEW + 1, 5)
    lengths = set()
    for end in steps:
        text = tokenizer.decode(produced[end - width : end])
        for stop in {text, text[1:-1] or text}:
            kwargs = dict(max_new_tokens=NEW, stop_strings=[stop, "never"], tokenizer=tokenizer)
            assert_identical(model, inputs, **kwargs, speculative=CONFIG)
            lengths.add(model.last_speculation.new_tokens)
    assert min(lengths) < NEW, "no stop string ever stopped"


def test_stop_strings_in_a_batch():
    """Without an EOS plain decoding lets stopped rows run on; with one it pads them."""
    tokenizer = piece_tokenizer()
    inputs = prompt(LENGTHS)
    model = model_with("mixed", shared_target(), inputs)
    produced = new_tokens(model, inputs)
    stops = [tokenizer.decode(produced[row, 2 + row : 4 + row]) for row in range(3)]
    kwargs = dict(max_new_tokens=NEW, stop_strings=stops, tokenizer=tokenizer)
    assert_identical(model, inputs, **kwargs)
    eos = absent_token(shared_target(), inputs)
    assert_identical(model, inputs, **kwargs, eos_token_id=eos, pad_token_id=0)


# -- criteria --------------------------------------------------------------------------------------


class AtLength(StoppingCriteria):
    """Fires for a row when the whole text is exactly this long; one length or one per row."""

    def __init__(self, *lengths: int):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return (self.lengths == input_ids.shape[1]).expand(input_ids.shape[0])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_criterion_that_fires_at_exactly_n_for_every_n(drafter):
    inputs = prompt([4])
    model = model_with(drafter, shared_target(), inputs)
    steps = range(1, NEW + 1) if drafter in ("oracle", "mixed") else (1, 2, 7)
    for n in steps:
        stop = StoppingCriteriaList([AtLength(4 + n)])
        assert_identical(
            model, inputs, max_new_tokens=NEW + 2, stopping_criteria=stop, speculative=CONFIG
        )
        assert model.last_speculation.new_tokens == n


@pytest.mark.parametrize("eos", [None, "absent"])
@pytest.mark.parametrize("ends", [(3, 7, 5), (1, 9, 2), (8, 8, 1), (12, 2, 4)])
def test_rows_stopped_at_different_lengths_by_a_criterion_with_one_limit_per_row(ends, eos):
    """No EOS: Transformers keeps stopped rows running until the last one stops, unpadded."""
    inputs = prompt(LENGTHS)
    target = shared_target()
    eos = None if eos is None else absent_token(target, inputs)
    model = model_with("mixed", target, inputs)
    stop = StoppingCriteriaList([AtLength(*(6 + end for end in ends))])
    kwargs = dict(max_new_tokens=NEW, stopping_criteria=stop, pad_token_id=0)
    stats = assert_identical(model, inputs, **kwargs, eos_token_id=eos)
    assert stats.new_tokens == (3 * max(ends) if eos is None else sum(ends))
    assert_identical(model, inputs, **kwargs, eos_token_id=eos, speculative=None)


def absent_token(target, inputs) -> int:
    """A token that none of the rows produces."""
    produced = {t for row in continuations(target, inputs, max_new_tokens=NEW) for t in row}
    return min(set(range(1, VOCAB)) - produced)


class Watching(StoppingCriteria):
    """Records what it is shown."""

    def __init__(self):
        self.lengths: list[int] = []
        self.scores: list[int | None] = []
        self.agree = True

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        self.scores.append(None if scores is None else len(scores))
        if scores is not None:
            assert all(s.shape == (len(input_ids), VOCAB) for s in scores)
            self.agree &= bool((scores[-1].argmax(-1) == input_ids[:, -1]).all())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("drafter", ["oracle", "random"])
def test_criteria_see_every_token_once_with_its_scores(drafter):
    inputs = prompt([4], extra=1)
    model = model_with(drafter, shared_target(), inputs)
    for output_scores in (False, True):
        seen = []
        for generate in (plain, eagle):
            watching = Watching()
            generate(
                model,
                inputs,
                max_new_tokens=NEW,
                stopping_criteria=StoppingCriteriaList([watching]),
                return_dict_in_generate=True,
                output_scores=output_scores,
            )
            assert watching.agree
            seen.append((watching.lengths, watching.scores))
        assert seen[0] == seen[1]


class Confident(StoppingCriteria):
    """Stops a row when the best score of its last step beats its limit."""

    def __init__(self, limits: torch.Tensor):
        self.limits = limits

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].amax(dim=-1) > self.limits


def test_criteria_that_read_scores_stop_where_plain_stops():
    inputs = prompt(LENGTHS)
    model = model_with("mixed", shared_target(), inputs)
    outputs = dict(max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True)
    free = plain(model, inputs, **outputs)
    best = torch.stack(free.scores).amax(-1)  # [steps, rows]
    for n in range(0, NEW, 3):
        limits = best[n] - 1e-3
        stop = StoppingCriteriaList([Confident(limits)])
        wanted = plain(model, inputs, **outputs, stopping_criteria=stop)
        got = eagle(model, inputs, **outputs, stopping_criteria=stop)
        assert got.sequences.tolist() == wanted.sequences.tolist()
        assert len(got.scores) == len(wanted.scores)


class Slow(StoppingCriteria):
    """Makes every token take a while, and counts them."""

    def __init__(self, seconds: float):
        self.seconds, self.calls = seconds, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        time.sleep(self.seconds)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_max_time():
    inputs = prompt([4])
    model = model_with("oracle", shared_target(), inputs)
    assert_identical(model, inputs, max_new_tokens=NEW, max_time=1e-9)
    assert model.last_speculation.new_tokens == 1
    assert_identical(model, inputs, max_new_tokens=NEW, max_time=1e9)
    # Time runs out inside an accepted block: the block is cut there.
    slow = Slow(0.3)
    out = eagle(
        model,
        inputs,
        max_new_tokens=NEW,
        max_time=1.0,
        stopping_criteria=StoppingCriteriaList([slow]),
    )
    assert slow.calls == out.shape[1] - 4 < NEW
    assert out.tolist() == plain(model, inputs, max_new_tokens=slow.calls).tolist()


@pytest.mark.parametrize("sequences", [2, 3])
def test_num_return_sequences_is_what_transformers_makes_of_it(sequences):
    inputs = prompt([4, 2])
    model = model_with("random", shared_target(), inputs)
    results = []
    for generate in (plain, eagle):
        try:
            results.append(
                generate(model, inputs, max_new_tokens=5, num_return_sequences=sequences).tolist()
            )
        except ValueError as error:
            results.append(str(error))
    assert results[0] == results[1]
