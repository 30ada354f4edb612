"""Catches: processors that see a history without the drafted prefix or with a sibling's tokens (A5,
G2), that are called with the wrong batch row, or that are skipped for drafted tokens (G1); grammars
that the tree leads outside the language or whose callback meets an impossible prefix (G5).
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from scripted import Oracle, ScriptedModel, continuations, small_drafter
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from eagle4 import Eagle4ForCausalLM
from tests.engine.compare import (
    DRAFTERS,
    VOCAB,
    assert_identical,
    eagle,
    model_with,
    plain,
    prompt,
    shared_target,
)

NEW = 14
LENGTHS = [6, 1, 4]
RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "ngram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[3, 4], [7], [9, 2, 11], [5, 5]]},
    "bias": {"sequence_bias": [[[4], 1.5], [[8, 9], -5.0]]},
    "suppress": {"suppress_tokens": [4, 5, 6]},
    "begin": {"begin_suppress_tokens": list(range(1, 12))},
    "forced eos": {"forced_eos_token_id": 3},
    "encoder": {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2},
    "normalised": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "synthid": {
        "watermarking_config": SynthIDTextWatermarkingConfig(
            keys=[11, 5, 7], ngram_len=3, sampling_table_size=64, context_history_size=16
        )
    },
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[3, 4], [7]],
        "suppress_tokens": [4],
        "encoder_no_repeat_ngram_size": 2,
    },
}


@pytest.mark.parametrize(
    ("name", "drafter"),
    [(name, drafter) for name in RULES for drafter in ("mixed", "random")]
    + [
        (name, drafter) for name in ("repetition", "ngram", "all") for drafter in ("oracle", "liar")
    ],
)
def test_greedy_identity_with_processors(name, drafter):
    inputs = prompt(LENGTHS, extra=1)
    target = shared_target()
    # Where the end of the text changes what is said (forced EOS) the script knows that end.
    new = NEW - 8 if name == "forced eos" else NEW
    model = model_with(drafter, target, inputs, new, **RULES[name])
    stats = assert_identical(model, inputs, max_new_tokens=NEW, **RULES[name])
    if drafter == "mixed" and name != "normalised":
        kwargs = [RULES[name], {}]
        processed, free = (plain(model, inputs, max_new_tokens=NEW, **kw).tolist() for kw in kwargs)
        assert processed != free, "the rule changes nothing here"
    if drafter == "oracle":
        assert stats.accept_length > 2


@pytest.mark.parametrize("drafter", ["oracle", "random"])
def test_length_rules_count_from_the_prompt(drafter):
    inputs = prompt(LENGTHS, extra=2)
    target = shared_target()
    eos = sorted({row[-40 + 2] for row in continuations(target, inputs, max_new_tokens=40)})
    rules = dict(eos_token_id=eos, pad_token_id=0)
    for minimum in (dict(min_new_tokens=6), dict(min_length=13)):
        free = {**rules, **minimum}
        known = {**rules, "min_new_tokens": 30}
        model = model_with(drafter, target, inputs, 22, **known)
        if drafter == "oracle":
            model.draft.references = continuations(target, inputs, max_new_tokens=NEW, **free)
        assert_identical(model, inputs, max_new_tokens=NEW, **free)
    decay = dict(exponential_decay_length_penalty=(3, 1.8), **rules)
    model = model_with("random", target, inputs)
    assert_identical(model, inputs, max_new_tokens=NEW, **decay)


# -- constraints -----------------------------------------------------------------------------------


class Brackets:
    """Tokens 1 and 2 are brackets that must balance; the row of the batch decides the rest."""

    def __init__(self, starts: list[int]):
        self.starts = starts

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        depth = 0
        for token in ids[self.starts[row] :].tolist():
            depth += (token == 1) - (token == 2)
            if depth < 0 or token in self.banned(row):
                raise AssertionError(f"row {row} meets the impossible text {ids.tolist()}")
        allowed = [t for t in range(1, VOCAB) if t != 2 and t not in self.banned(row)]
        return allowed + [2] * (depth > 0)

    def banned(self, row: int) -> set[int]:
        return set(range(5 + 3 * row, 9 + 3 * row))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_grammar_that_refuses_impossible_prefixes(drafter):
    """Wide trees leave the language all the time; the callback must never see that."""
    inputs = prompt(LENGTHS)
    width = inputs["input_ids"].shape[1]
    rules = dict(prefix_allowed_tokens_fn=Brackets([width] * 3))
    model = model_with(drafter, shared_target(), inputs, NEW, **rules)
    assert_identical(model, inputs, max_new_tokens=NEW, **rules, speculative={"top_k": 3})


class UntilEnd:
    """Allows everything before the end token; there is nothing to allow behind it."""

    def __init__(self, start: int, end: int):
        self.start, self.end = start, end

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        return [] if self.end in ids[self.start :] else list(range(1, VOCAB))


def test_a_grammar_with_nothing_behind_eos():
    """EOS is drafted and accepted mid-block: plain decoding stops before it asks what follows."""
    inputs = prompt([5])
    target = shared_target()
    known = continuations(target, inputs, max_new_tokens=30)
    for n in range(1, 9):
        eos = known[0][5 + n]
        model = ScriptedModel(target, Oracle(known, VOCAB))
        rules = dict(eos_token_id=eos, pad_token_id=0, prefix_allowed_tokens_fn=UntilEnd(5, eos))
        assert_identical(model, inputs, max_new_tokens=NEW, **rules)


def test_a_grammar_that_fails_for_good_fails_as_in_plain_decoding():
    inputs = prompt([5])
    target = shared_target()
    known = continuations(target, inputs, max_new_tokens=30)
    model = ScriptedModel(target, Oracle(known, VOCAB))
    rules = dict(prefix_allowed_tokens_fn=UntilEnd(5, known[0][5 + 4]))
    for generate in (plain, eagle):
        with pytest.raises(ValueError, match="empty list"):
            generate(model, inputs, max_new_tokens=NEW, **rules)


# -- the user's own --------------------------------------------------------------------------------


class Diary(LogitsProcessor):
    """Stateful: writes down what it sees and favours a token by the number of its call."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, 1 + len(self.seen) % 7] += 2.0
        return scores


@pytest.mark.parametrize("drafter", ["random", "oracle"])
def test_a_stateful_processor_is_called_as_in_plain_decoding(drafter):
    inputs = prompt([5])
    target = shared_target()
    reference = Diary()
    wanted = target.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=NEW,
        logits_processor=LogitsProcessorList([reference]),
    )
    model = Eagle4ForCausalLM(target, small_drafter(target))
    if drafter == "oracle":
        model = ScriptedModel(target, Oracle([wanted[0].tolist()], VOCAB))
    mine = Diary()
    got = eagle(model, inputs, max_new_tokens=NEW, logits_processor=LogitsProcessorList([mine]))
    assert got.tolist() == wanted.tolist()
    assert mine.seen == reference.seen


class BiasPerRow(LogitsProcessor):
    def __init__(self, batch: int):
        self.bias_BV = 2 * torch.randn(batch, VOCAB, generator=torch.Generator().manual_seed(0))

    def __call__(self, input_ids, scores):
        return scores + self.bias_BV


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_processors_with_one_setting_per_row(drafter):
    inputs = prompt(LENGTHS)
    per_row: list[LogitsProcessor] = [BiasPerRow(3)]
    if tiny.HAS_IGNORE_LENGTH_PER_ROW:
        length = torch.tensor([6, 0, 3])
        per_row.append(RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=length))
    for processor in per_row:
        rules = dict(logits_processor=LogitsProcessorList([processor]))
        model = model_with(drafter, shared_target(), inputs, NEW, **rules)
        assert_identical(model, inputs, max_new_tokens=NEW, **rules)
