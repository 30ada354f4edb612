"""Catches: a round that decides or says something else when its launches are replayed, padding that
shows, recordings that multiply from round to round or from call to call, a function that is left
out, one that must be and is not.

Launches are recorded on the CPU (`replaying`); the last test records CUDA graphs.
"""

from __future__ import annotations

import functools

import pytest
import torch
from replaying import record_on_cpu
from tiny import tiny_llama

import eagle4.cache.scratch
import eagle4.cache.step
from eagle4.engine import graphs as graphs_module
from eagle4.engine.on_device import DeviceDraft
from tests.engine.compare import count_target_rows, prompt
from tests.engine.hybrids import target_of
from tests.engine.launched import FIXED, Launched, recorded_functions, replays_of
from tests.engine.test_on_device import Moody


@pytest.fixture
def made(monkeypatch):
    """The recorders of this test's models."""
    return record_on_cpu(monkeypatch)


@pytest.mark.parametrize("lengths", [[6], [7, 2, 5]], ids=str)
@pytest.mark.parametrize("kernels", [False, True], ids=["slots", "pages"])
def test_device_led_rounds_are_the_same(made, monkeypatch, lengths, kernels):
    """Ragged batches; keys gathered by slots, and read in their pages as kernels do."""
    if kernels:
        for module in (eagle4.cache.step, eagle4.cache.scratch):
            monkeypatch.setattr(module, "has_kernels", lambda device: True)
    both = Launched()
    both.same(lengths)
    assert made[0].recorded > 5 and made[0].replayed > 100


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"do_sample": True, "seed": 5, "temperature": 0.7},
        {"do_sample": True, "seed": 5, "speculative": FIXED | {"sampling": "rejection"}},
    ],
    ids=["greedy", "coupled", "rejection"],
)
def test_host_led_rounds_are_the_same(made, kwargs):
    both = Launched(decides=False, sliding_window=9)
    both.same([7, 3], **{"speculative": FIXED} | kwargs)
    assert made[0].replayed > 20


def test_coupled_rounds_that_the_device_decides_are_the_same(made):
    Launched().same([6, 3], do_sample=True, seed=5, temperature=0.6)
    assert made[0].replayed > 50


def test_scores_and_hidden_states_have_no_padding(made):
    both = Launched()
    kwargs = {"output_scores": True, "output_logits": True}
    for more in ({}, {"output_hidden_states": True}):
        found = both.same([7, 2], **kwargs, **more)
        wanted = both.models[0].generate(
            **prompt([7, 2], extra=1),
            **{"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True},
            **{"speculative": None, **kwargs, **more},
        )
        for name in ("scores", "logits"):
            for one, other in zip(getattr(found, name), getattr(wanted, name), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        if more:
            for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert made[0].replayed > 50


def test_recordings_are_constant_after_the_first_calls(made):
    """More than 100 rounds, in two calls with pools in the same place."""
    model, rounds = Launched().replayed, []
    for lengths in ([6], [9], [6], [8]):
        before = made[0].recorded if made else 0
        model.generate(
            **prompt(lengths, extra=1),
            **{"do_sample": False, "max_new_tokens": 90, "speculative": {"max_depth": 4}},
        )
        rounds.append((model.last_speculation.rounds, made[0].recorded - before))
    assert sum(count for count, _ in rounds[2:]) > 100
    assert [new for _, new in rounds[2:]] == [0, 0]
    assert made[0].recorded == replays_of(model).num_recordings < 40
    assert made[0].replayed > 400


def test_every_function_of_a_round_is_recorded(made):
    both = Launched()
    both.same([6], max_new_tokens=60)
    both.same([6], max_new_tokens=60, do_sample=True, seed=2)
    found = recorded_functions(both.replayed)
    assert set(found) == {"draft", "propose", "open_tree", "level", "finish", "packed_rows"}
    assert all(found.values()), found


def test_plain_decoding_is_replayed(made):
    both = Launched()
    arguments = {"do_sample": False, "max_new_tokens": 40, "speculative": None}
    outs = [model.generate(**prompt([5, 3]), **arguments) for model in both.models]
    assert torch.equal(*outs)
    assert made[0].recorded == replays_of(both.replayed).num_recordings == 1
    # Plain rounds of a speculative call are no such recordings: their taps are wanted.
    both.same([5, 3])


def test_inference_mode_and_back(made):
    both = Launched()
    with torch.inference_mode():
        both.same([6])
    both.same([6])
    with torch.inference_mode():
        both.same([6])


def test_compiled_functions_are_recorded_too(made, monkeypatch):
    """Blocks as part of the target's forward, the warm-up's made-up sizes not at all."""
    compiled = []

    def compile(function, **kwargs):
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(graphs_module.torch, "compile", compile)
    both = Launched()
    both.replayed.compile_mode = "on"
    both.same([6], max_new_tokens=1)
    assert compiled and not made[0].recorded
    both.same([6])
    graphs = both.replayed.graphs()
    assert graphs.compiled and graphs.blocks is not None and made[0].replayed > 50
    found = {f._name: f.num_recordings for f in graphs.replays._functions}
    assert set(compiled) == set(found) - {"packed_rows"} | {"run_blocks"}
    direct = both.replayed.graphs(disable_compile=True)
    assert direct.replays is not None and not direct.compiled


def test_recurrent_targets_are_launched_directly(made, monkeypatch):
    """Their state follows rows in Python; the drafter is replayed all the same."""
    both = Launched(target_of("qwen3_next"))
    rows = count_target_rows(monkeypatch)
    both.same([6, 3])
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]  # and nothing is added to them
    found = recorded_functions(both.replayed)
    assert found["packed_rows"] == 0 and found["level"] > 0


@pytest.mark.cuda
@pytest.mark.parametrize("compile", ["off", "on"])
@torch.no_grad()
def test_cuda_graphs_say_the_same(compile):
    target = tiny_llama(vocab=24, layers=2).cuda()
    both = Launched(target)
    for model in both.models:
        model.compile_mode = compile
        model.cuda()
        model._speculation = functools.partial(_moody, model)
    for lengths in ([6], [7, 2, 5], [6]):
        inputs = {name: value.cuda() for name, value in prompt(lengths, extra=1).items()}
        outs = [
            model.generate(**inputs, do_sample=False, max_new_tokens=60, speculative={})
            for model in both.models
        ]
        assert torch.equal(*outs)
    assert replays_of(both.replayed).num_recordings > 10


def _moody(model, config, request, *pair):
    policy = Moody(config, seed=0)
    return policy, DeviceDraft(model.drafter, policy)
