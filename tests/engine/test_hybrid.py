"""Catches, on targets with recurrent layers: an edited conversation that goes on from the wrong
state, caches that grow or share, speculation that a hybrid cannot use (harness, cost table,
sampling).
"""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from scripted import Liar, ScriptedModel, small_drafter
from zoo import VOCAB

from eagle4 import Eagle4ForCausalLM
from eagle4.engine import home, reference
from eagle4.engine.call import CACHE_KEYWORD
from tests.engine.compare import count_target_rows
from tests.engine.hybrids import SCRIPT, prompt, target_of
from tests.target.test_hybrids import generated, rows_alone

NAMES = ("qwen3_next", "bamba", "lfm2")


# -- second turns --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("speculative", [SCRIPT, None])
def test_a_second_turn_goes_on_from_the_state(name, speculative, monkeypatch):
    target, inputs = target_of(name), zoo.prompts()["batch"]
    model = Eagle4ForCausalLM(target, small_drafter(target))
    out = model.generate(
        **inputs, speculative=speculative, max_new_tokens=9, return_dict_in_generate=True
    )
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 9, dtype=torch.int64)], dim=1)
    more = torch.tensor([[4, 9], [33, 1], [7, 7]])
    whole = {
        "input_ids": torch.cat([out.sequences, more], dim=1),
        "attention_mask": torch.cat([mask, torch.ones_like(more)], dim=1),
    }
    rows = count_target_rows(monkeypatch)
    cache = {CACHE_KEYWORD: out[CACHE_KEYWORD]}
    found = generated(model, whole, speculative=speculative, **cache)
    assert rows[:3] == [3, 3, 3]  # the last token and two new ones, row by row
    assert found == rows_alone(target, whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("speculative", ["eagle4", None])
@pytest.mark.parametrize(("cut", "kept"), [(192, 192), (191, 128), (30, 0)])
def test_an_edited_conversation_goes_on_from_the_nearest_snapshot(
    name, speculative, cut, kept, monkeypatch
):
    target = target_of(name)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    cache, first = None, prompt(230)["input_ids"]
    for end in (70, 140, 230):  # a snapshot in every call
        out = model.generate(
            first[:, :end],
            speculative=speculative,
            max_new_tokens=1,
            return_dict_in_generate=True,
            **({} if cache is None else {CACHE_KEYWORD: cache}),
        )
        cache = out[CACHE_KEYWORD]
    ids = out.sequences.clone()
    ids[0, cut] = ids[0, cut] % (VOCAB - 1) + 1
    rows = count_target_rows(monkeypatch)
    kwargs = {"max_new_tokens": 12, CACHE_KEYWORD: cache}
    found = generated(model, {"input_ids": ids}, speculative=speculative, **kwargs)
    assert found == rows_alone(target, {"input_ids": ids}, max_new_tokens=12)
    assert rows[0] == ids.shape[1] - kept


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_in_chunks(name, chunk, monkeypatch):
    """Chunks shorter than the convolution, odd ones, and ones that end at block boundaries."""
    monkeypatch.setattr(reference, "PREFILL_CHUNK", chunk)
    target, inputs = target_of(name), prompt(70)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    found = generated(model, inputs, speculative=SCRIPT, max_new_tokens=8)
    assert found == rows_alone(target, inputs, max_new_tokens=8)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_prompt_again(name):
    target, inputs = target_of(name), prompt(70)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    out = model.generate(**inputs, **kwargs, speculative="eagle4", return_dict_in_generate=True)
    again = model.generate(
        **inputs, **kwargs, speculative="eagle4", **{CACHE_KEYWORD: out[CACHE_KEYWORD]}
    )
    assert again.tolist() == out.sequences.tolist() == target.generate(**inputs, **kwargs).tolist()


def test_a_cache_is_only_ours():
    model = Eagle4ForCausalLM(target_of("qwen3_next"))
    out = model.generate(**prompt(5), max_new_tokens=3, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="recurrent layers .* pass the Eagle4Cache itself"):
        out[CACHE_KEYWORD].to_dynamic_cache()


def test_a_copied_cache_is_independent():
    target = target_of("qwen3_next")
    model = Eagle4ForCausalLM(target, small_drafter(target))
    out = model.generate(**prompt(9), max_new_tokens=6, return_dict_in_generate=True)
    turns = []
    for cache in (copy.deepcopy(out[CACHE_KEYWORD]), out[CACHE_KEYWORD]):
        kwargs = {"max_new_tokens": 8, CACHE_KEYWORD: cache}
        turns.append(generated(model, {"input_ids": out.sequences}, speculative="eagle4", **kwargs))
    assert (
        turns[0] == turns[1] == rows_alone(target, {"input_ids": out.sequences}, max_new_tokens=8)
    )


def test_generations_leave_nothing_behind():
    target, inputs = target_of("qwen3_next"), zoo.prompts()["batch"]
    model = ScriptedModel(target, Liar(rows_alone(target, inputs, max_new_tokens=4), VOCAB))
    cache, sizes = None, set()
    for _ in range(6):
        kwargs = {} if cache is None else {CACHE_KEYWORD: cache}
        out = model.generate(
            **inputs, **kwargs, speculative=SCRIPT, max_new_tokens=4, return_dict_in_generate=True
        )
        cache = out[CACHE_KEYWORD]
        sizes.add(cache.num_bytes)
    assert len(sizes) == 1


# -- everything else is as for any target ----------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_harness_measures_and_decides(name):
    target, inputs = target_of(name), prompt(6)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    expected = rows_alone(target, inputs, max_new_tokens=70)
    assert generated(model, inputs, speculative="eagle4", max_new_tokens=70) == expected
    table = model.last_harness.table
    assert table.fingerprint == home.fingerprint(model.adapter, model.drafter)
    assert {"verify", "plain", "root", "level", "finish"} <= set(table.surfaces)
    assert not model.last_speculation.fallbacks and model.last_speculation.harness


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_sampling_repeats_with_its_seed(name, sampling):
    target, inputs = target_of(name), prompt(9)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    draws = [
        model.generate(
            **inputs, do_sample=True, seed=3, max_new_tokens=16, speculative=speculative
        ).tolist()
        for speculative in (
            {**SCRIPT, "sampling": sampling},
            {**SCRIPT, "sampling": sampling},
            None,
        )
    ]
    assert draws[0] == draws[1]
    assert sampling == "rejection" or draws[0] == draws[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_compiled_blocks_leave_recurrent_ones_alone(name):
    """Blocks of attention alone are compiled, the others keep the state of the whole step."""
    target, inputs = target_of(name), zoo.prompts()["batch"]
    model = Eagle4ForCausalLM(target, small_drafter(target), compile="on")
    expected = rows_alone(target, inputs, max_new_tokens=12)
    assert generated(model, inputs, speculative=SCRIPT, max_new_tokens=12) == expected
    assert not model.last_speculation.fallbacks
