"""Catches, on targets with recurrent layers: committed state that is not that of the committed
tokens, branches that leave something behind, verification that needs states of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
import zoo_hybrid
from packed import Packer, Rows, chain
from scripted import Mixed, Oracle, ScriptedModel
from zoo import VOCAB

from eagle4.cache import KVPool, PageTable, Window, build_step
from tests.engine.hybrids import SCRIPT, prompt, target_of
from tests.target.test_hybrids import generated, rows_alone


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


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])  # experts group rows by content
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
