"""Catches, on targets with recurrent layers: committed state that is not that of the committed
tokens, an edited conversation that goes on from the wrong state, speculation that a hybrid cannot
use (harness, cost table, sampling, training), verification that needs states of its own.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import zoo
import zoo_hybrid
from packed import Packer, Rows, chain
from scripted import Liar, Mixed, Oracle, ScriptedModel, small_drafter
from transformers import PreTrainedModel
from zoo import VOCAB

from eagle4 import Eagle4ForCausalLM
from eagle4.cache import KVPool, PageTable, Window, build_step
from eagle4.engine import home
from eagle4.engine.call import CACHE_KEYWORD
from eagle4.training.extract import check_head, extract
from tests.engine.compare import count_target_rows
from tests.target.test_hybrids import generated, rows_alone

NAMES = ("qwen3_next", "bamba", "lfm2")
SCRIPT = {"max_depth": 6, "top_k": 3, "max_nodes": 12}


@functools.cache
def target_of(name: str) -> PreTrainedModel:
    return zoo_hybrid.build(name)


def prompt(length: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(1, VOCAB, (1, length), generator=generator)}


# -- state ---------------------------------------------------------------------------------------


def prefilled(adapter, ids: torch.Tensor) -> KVPool:
    """Caches of a fresh prefill of one sequence."""
    table, pool = PageTable(1), KVPool()
    table.ensure(0, len(ids))
    pool.resize(table.num_slots)
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    window = Window(0, 0, 0, torch.arange(len(ids)), visible)
    step = build_step(table, [window], torch.device("cpu"), is_prompt=True)
    adapter.forward(ids, step, pool)
    return pool


class Audited:
    """A draft that first compares all caches with a fresh prefill of the committed tokens."""

    def __init__(self, draft):
        self.draft = draft
        self.adapter: Any = None
        self.worst = self.rounds = 0

    def __call__(self, state, sequences, *args):
        kept = state.target_pool
        kept.recurrent.settle()
        for s in sequences:
            fresh = prefilled(self.adapter, state.tokens(s)[: s.kv_length])
            pairs = [
                (getattr(kept.recurrent, name)[:, s.index], getattr(fresh.recurrent, name)[:, 0])
                for name in ("conv_LSWC", "state_LSHKV")
            ]
            slots = torch.tensor(state.table.slots(s.index, 0, s.kv_length))
            for layer, wanted in fresh.layers.items():
                found = kept.layers[layer]
                pairs += [(a[slots], b[: s.kv_length]) for a, b in zip(found, wanted, strict=True)]
            for found, wanted in pairs:
                if wanted.numel():
                    error = float((found - wanted).abs().max() / wanted.abs().max())
                    self.worst = max(self.worst, error)
            assert kept.recurrent.lengths[s.index] == s.kv_length == s.length - 1
        self.rounds += 1
        return self.draft(state, sequences, *args)


@pytest.mark.parametrize("name", list(zoo_hybrid.HYBRIDS))
def test_after_every_round_the_state_is_a_fresh_prefills(name):
    target, inputs = target_of(name), zoo.prompts()["batch"]
    expected = rows_alone(target, inputs)
    audited = Audited(Mixed(expected, VOCAB, [2, 5, 0], siblings=2))
    model = ScriptedModel(target, audited)
    audited.adapter = model.adapter
    assert generated(model, inputs, speculative=SCRIPT) == expected
    assert not model.last_speculation.fallbacks and audited.rounds > 8
    print(f"{name}: {audited.rounds} rounds, largest relative error {audited.worst:.1e}")
    assert audited.worst < 2e-4


@pytest.mark.parametrize("name", NAMES)
def test_wrong_branches_leave_no_bit_behind(name):
    """Two trees of the same rows on the accepted path and other tokens beside it."""
    states = []
    for wrong in (7, 50):
        packer = Packer(target_of(name))
        packer.run(chain(0, 0, [5, 17, 3, 60]), is_prompt=True)
        packer.run(Rows(0, 4, [9, wrong, 30, wrong + 1, 41, wrong + 2], [-1, 0, 0, 1, 2, 4]))
        pool = packer.pool.recurrent
        pool.commit(0, [0, 2, 4])
        pool.settle()
        states.append((pool.conv_LSWC.clone(), pool.state_LSHKV.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_verification_needs_a_fraction_of_a_state_per_layer():
    """16 nodes on layers with the widths of Qwen3-Next: peak of everything that is allocated."""
    wide = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    layers = ["linear_attention"] * 4 + ["full_attention"]
    target = zoo_hybrid.build(
        "qwen3_5", **wide, **heads, layer_types=layers, num_hidden_layers=len(layers)
    )
    packer = Packer(target)
    packer.run(chain(0, 0, [5, 17, 3, 60]), is_prompt=True)
    parent = [-1, 0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11]
    nodes = Rows(0, 4, list(range(20, 20 + len(parent))), parent)
    packer.run(nodes)  # everything that is made once is there
    pool = packer.pool.recurrent
    state = pool.state_LSHKV[0].numel() * 4
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        packer.run(nodes)
    live = peak = 0
    for event in profile.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    recurrent = len(pool.place)
    payload = sum(x.numel() * x.element_size() for x in pool.conv_rows.values())
    payload += sum(x.numel() * x.element_size() for rows in pool.state_rows.values() for x in rows)
    print(
        f"state {state:,} bytes a layer; kept for the commit {payload / recurrent / state:.2f} "
        f"states a layer; peak of the whole forward {peak / recurrent / state:.2f} states a layer"
    )
    assert payload < 0.5 * state * recurrent and 0 < peak < 2 * state * recurrent


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
@pytest.mark.parametrize(("cut", "kept"), [(200, 192), (100, 64), (192, 128), (191, 128), (30, 0)])
def test_an_edited_conversation_goes_on_from_the_nearest_snapshot(
    name, speculative, cut, kept, monkeypatch
):
    if speculative is None and cut == 192:
        kept = 192  # only a draft entry depends on the token behind it
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
            {**SCRIPT, "harness": False, "sampling": sampling},
            {**SCRIPT, "harness": False, "sampling": sampling},
            None,
        )
    ]
    assert draws[0] == draws[1]
    assert sampling == "rejection" or draws[0] == draws[2]


def test_running_out_of_memory_in_a_tree_decodes_plainly():
    """The failed verification left half of its rows in the pool."""
    target, inputs = target_of("qwen3_next"), prompt(9)
    expected = rows_alone(target, inputs)
    model = ScriptedModel(target, Oracle(expected, VOCAB))
    block = target.model.layers[1]
    seen = []

    def fail(module, args):
        seen.append(args[0].shape[1])
        if len(seen) == 4:
            raise torch.OutOfMemoryError("no room for the tree")

    assert model.adapter is not None  # probed before anything is counted
    handle = block.register_forward_pre_hook(fail)
    found = generated(model, inputs, speculative=SCRIPT)
    handle.remove()
    assert found == expected and seen[3] > 1
    assert list(model.last_speculation.fallbacks) == ["OutOfMemoryError: no room for the tree"]


@pytest.mark.parametrize("name", NAMES)
def test_features_for_training_are_what_the_drafter_gets(name):
    target = target_of(name)
    ids = prompt(40)["input_ids"][0]
    check_head(target, ids)
    taps, _ = extract(target, [0, 1, 2], ids)
    packer = Packer(target, taps=[0, 1, 2])
    out = packer.run(chain(0, 0, ids[:-1].tolist()), is_prompt=True)
    error = (out.features_RTH - taps.float()).abs().max()
    assert error < 1e-2 * taps.float().abs().max()
