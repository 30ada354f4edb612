"""Catches: a round that decides or says something else when its launches are replayed, recordings
that multiply from round to round or from call to call, padding that shows, pools that move without
need or are read after they moved, a mode that is not checked or does not reach the rounds.

Launches are recorded on the CPU (`replaying`); the last test records CUDA graphs.
"""

from __future__ import annotations

import functools

import pytest
import torch
from replaying import record_on_cpu
from scripted import small_drafter
from tiny import tiny_llama

import eagle4.cache.scratch
import eagle4.cache.step
from eagle4 import Eagle4ForCausalLM
from eagle4.engine import graphs as graphs_module
from eagle4.engine import loop, on_device
from eagle4.engine.call import CACHE_KEYWORD
from eagle4.engine.home import fingerprint
from eagle4.engine.speculation import policy_and_draft
from tests.engine.compare import prompt, shared_target
from tests.engine.hybrids import target_of
from tests.engine.test_on_device import Moody, MoodyModel

DIRECT, GRAPHS = "direct", "graphs"
FIXED = {"harness": False, "max_depth": 4, "max_nodes": 7}


@pytest.fixture
def made(monkeypatch):
    """The recorders of this test's models."""
    return record_on_cpu(monkeypatch)


def replays_of(model):
    (graphs,) = model._graphs.made.values()
    return graphs.replays


class Launched:
    """The same model, directly launched and replayed."""

    def __init__(self, target=None, decides: bool = True, **switches):
        target = target or shared_target()
        drafter = small_drafter(target, **switches)
        self.models = [MoodyModel(target, None, drafter) for _ in range(2)]
        for model, mode in zip(self.models, (DIRECT, GRAPHS), strict=True):
            model.launch_mode = mode
            if not decides:
                model._speculation = policy_and_draft

    @property
    def replayed(self) -> MoodyModel:
        return self.models[1]

    def same(self, lengths: list[int], speculative=None, **kwargs):
        """Both say and decide the same; returns what the replayed one returned."""
        kwargs = {"max_new_tokens": 40, "do_sample": False, **kwargs}
        outs, told = [], []
        for model in self.models:
            inputs = prompt(lengths, extra=1)
            given = speculative or {"max_depth": 4}
            outs.append(
                model.generate(**inputs, speculative=given, return_dict_in_generate=True, **kwargs)
            )
            stats = outs[-1].speculation
            assert not stats.fallbacks, stats.fallbacks
            told.append((stats.accepted_per_round, stats.nodes_drafted, stats.nodes_verified))
            told[-1] += (stats.host_reads, stats.draft_calls)
        assert torch.equal(outs[0].sequences, outs[1].sequences)
        assert told[0] == told[1]
        return outs[1]


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
    found = {f._name: f.num_recordings for f in replays_of(both.replayed)._functions}
    assert set(found) == {"draft", "propose", "open_tree", "level", "finish", "packed_rows"}
    assert all(found.values()), found


def test_plain_decoding_is_replayed(made):
    both = Launched()
    arguments = {"do_sample": False, "max_new_tokens": 40, "speculative": None}
    outs = [model.generate(**prompt([5, 3]), **arguments) for model in both.models]
    assert torch.equal(*outs)
    assert made[0].recorded == replays_of(both.replayed).num_recordings == 1


def test_pools_that_grow_take_their_recordings_with_them(made, monkeypatch):
    """Room is made a page at a time, so the pools move in the middle of the text."""
    monkeypatch.setattr(
        loop, "_reserve", lambda call, sequence: call.state.reserve(sequence, sequence.length)
    )
    both, moved = Launched(), []
    from eagle4.engine.replay import Replays

    original = Replays.drop
    monkeypatch.setattr(
        Replays, "drop", lambda self, *args: (moved.append(args), original(self, *args))
    )
    both.same([30, 7], max_new_tokens=110)
    replays = replays_of(both.replayed)
    assert moved and made[0].recorded > replays.num_recordings
    pools = [kept for kind in replays.pools.values() for kept in kind._kept]
    alive = {id(t) for _, layers in pools for pair in layers.values() for t in pair}
    assert {id(ref()) for ref, _ in replays._numbers.values()} <= alive
    # The next call starts with as much room as this one ended with.
    moved.clear()
    both.same([30, 7], max_new_tokens=110)
    assert not moved


def test_a_cache_that_the_caller_keeps_is_its_own(made):
    """Pools in use are not given away; a second turn goes on with them."""
    both = Launched()
    first = both.same([6])
    kept = first[CACHE_KEYWORD]
    before = {k: [t.clone() for t in pair] for k, pair in kept.state.target_pool.layers.items()}
    both.same([9])
    for layer, pair in kept.state.target_pool.layers.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, before[layer], strict=True))
    more = torch.cat([first.sequences, torch.full((1, 4), 3)], dim=1)
    outs = [
        model.generate(
            more, do_sample=False, max_new_tokens=30, speculative={"max_depth": 4}, **cached
        )
        for model, cached in zip(both.models, ({}, {CACHE_KEYWORD: kept}), strict=True)
    ]
    assert torch.equal(*outs)


def test_inference_mode_and_back(made):
    both = Launched()
    with torch.inference_mode():
        both.same([6])
    both.same([6])
    with torch.inference_mode():
        both.same([6])


def test_new_weights_are_used(made):
    both = Launched(tiny_llama(vocab=24, layers=2))
    both.same([6])
    before = made[0].recorded
    both.replayed.target.lm_head.weight.data = both.replayed.target.lm_head.weight.flip(0)
    both.same([6])
    assert made[0].recorded > before


def test_compiled_functions_are_recorded_too(made, monkeypatch):
    """Blocks as part of the target's forward, the warm-up's made-up sizes not at all."""
    compiled = []

    def compile(function, **kwargs):
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(graphs_module.torch, "compile", compile)
    both = Launched()
    both.replayed.compile_mode = "on"
    both.same([6])
    graphs = both.replayed.graphs()
    assert graphs.compiled and graphs.block is not None and made[0].replayed > 50
    found = {f._name: f.num_recordings for f in graphs.replays._functions}
    assert set(compiled) == set(found) - {"packed_rows"} | {"run_block"}
    assert made[0].recorded == graphs.replays.num_recordings < 20
    direct = both.replayed.graphs(disable_compile=True)
    assert direct.replays is not None and not direct.compiled


def test_recurrent_targets_are_launched_directly(made):
    """Their state follows rows in Python; the drafter is replayed all the same."""
    both = Launched(target_of("qwen3_next"))
    both.same([6, 3])
    found = {f._name: f.num_recordings for f in replays_of(both.replayed)._functions}
    assert found["packed_rows"] == 0 and found["level"] > 0


def test_modes_are_checked():
    target = shared_target()
    with pytest.raises(ValueError, match="launch must be one of .*'graphs'.* got 'fast'"):
        Eagle4ForCausalLM(target, launch="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="launch must be one of"):
        Eagle4ForCausalLM.from_pretrained(target, launch="fast")  # type: ignore[arg-type]
    model = Eagle4ForCausalLM.from_pretrained(target, small_drafter(target), launch="graphs")
    with pytest.raises(ValueError, match="on cpu; move it to a CUDA device, or .*'direct'"):
        model.generate(**prompt([4]), max_new_tokens=2, speculative="eagle4")
    for mode in ("auto", "direct"):
        model.launch_mode = mode
        assert model.graphs() is graphs_module.EAGER


def test_a_saved_pair_takes_the_mode(tmp_path):
    target = tiny_llama(vocab=24, layers=2)
    Eagle4ForCausalLM(target, small_drafter(target)).save_pretrained(tmp_path)
    assert Eagle4ForCausalLM.from_pretrained(tmp_path, launch="direct").launch_mode == "direct"


def test_a_cost_table_belongs_to_replayed_or_direct_rounds(made):
    both = Launched()
    direct, replayed = (
        fingerprint(model.adapter, model.drafter, model.graphs()) for model in both.models
    )
    assert {k for k in direct if direct[k] != replayed[k]} == {"launch"}
    assert made[0].warms_up


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
    return policy, on_device.DeviceDraft(model.drafter, policy)
