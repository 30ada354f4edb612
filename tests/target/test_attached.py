"""Catches: a target that is not exactly what the user handed over once a generation has ended, for
whatever reason it ended; foreign calls in between that go wrong without saying why.
"""

from __future__ import annotations

import pytest
import torch
import zoo
from scripted import ScriptedModel, small_drafter
from transformers import StoppingCriteria

from eagle4 import Eagle4ForCausalLM
from eagle4.target import TargetAdapter

IDS = torch.tensor([[4, 9, 33, 17, 60]])
WIDE = {"hidden_size": 256, "intermediate_size": 256}  # wide enough for packed weights


class Interrupted(Exception):
    pass


class Call(StoppingCriteria):
    """Runs a function after the third token and never stops by itself."""

    def __init__(self, function):
        self.function = function

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == IDS.shape[1] + 3:
            self.function()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def trace(model) -> dict:
    """Everything that a generation changes on the target."""
    return {
        "attention": model.config._attn_implementation,
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "modes": [m.training for m in model.modules()],
        "weights": [(p.data_ptr(), p._version) for p in model.parameters()],
    }


def interrupt():
    raise Interrupted


@pytest.fixture
def target():
    return zoo.build("llama", **WIDE)


@pytest.mark.parametrize("speculative", [None, "eagle4"])
def test_everything_is_restored(target, speculative):
    before = trace(target)
    plain = target(IDS).logits
    greedy = target.generate(IDS, do_sample=False, max_new_tokens=8)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    for _ in range(2):
        out = model.generate(IDS, speculative=speculative, max_new_tokens=8)
        assert torch.equal(out, greedy)
        assert trace(target) == before
        assert torch.equal(target(IDS).logits, plain)
        assert torch.equal(target.generate(IDS, do_sample=False, max_new_tokens=8), greedy)


def test_everything_is_restored_after_an_exception(target):
    before = trace(target)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    seen = []

    def fail():
        seen.append(trace(target))
        interrupt()

    with pytest.raises(Interrupted):
        model.generate(IDS, max_new_tokens=8, speculative="eagle4", stopping_criteria=[Call(fail)])
    inside = seen[0]
    assert all(inside[name] != before[name] for name in ("attention", "hooks", "attributes"))
    assert trace(target) == before


def test_an_exception_inside_the_target_restores_too(target):
    before = trace(target)
    adapter = TargetAdapter(target, [0, 2])
    handle = target.model.layers[1].register_forward_pre_hook(lambda *args: interrupt())
    with pytest.raises(Interrupted):
        Eagle4ForCausalLM(target).generate(IDS, max_new_tokens=4, speculative=None)
    handle.remove()
    with pytest.raises(Interrupted), adapter.attached():
        interrupt()
    assert trace(target) == before


def test_a_draft_that_fails_leaves_no_trace(target):
    before = trace(target)
    greedy = target.generate(IDS, do_sample=False, max_new_tokens=8)
    model = ScriptedModel(target, lambda *args: interrupt())
    assert torch.equal(model.generate(IDS, speculative="eagle4", max_new_tokens=8), greedy)
    assert model.last_speculation.fallbacks and trace(target) == before


def test_training_mode_is_restored_module_by_module(target):
    target.train()
    target.model.layers[1].eval()
    before = trace(target)
    model = Eagle4ForCausalLM(target)
    model.generate(IDS, max_new_tokens=4, speculative=None)
    assert trace(target) == before
    with TargetAdapter(target).attached():
        assert not any(module.training for module in target.modules())
    assert trace(target) == before


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_the_users_attention_comes_back(target, implementation):
    target.set_attn_implementation(implementation)
    with TargetAdapter(target).attached():
        assert target.config._attn_implementation == "eagle4"
    assert target.config._attn_implementation == implementation


def test_the_attention_of_every_part_comes_back():
    """Setting a config's attention sets it for nested configs too."""
    target = zoo.tiny_gemma3_with_vision()
    target.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    configs = [target.config, target.config.text_config, target.config.vision_config]
    before = [part._attn_implementation for part in configs]
    assert before[1:] == ["sdpa", "eager"]
    with TargetAdapter(target).attached():
        assert configs[1]._attn_implementation == "eagle4"
    assert [part._attn_implementation for part in configs] == before


@pytest.mark.parametrize("speculative", [None, "eagle4"])
def test_a_foreign_call_in_between_says_why_it_fails(target, speculative):
    model = Eagle4ForCausalLM(target, small_drafter(target))
    messages = []

    def call():
        for foreign in (target, target.generate):
            with pytest.raises(RuntimeError) as caught:
                foreign(IDS)
            messages.append(str(caught.value))

    out = model.generate(
        IDS, max_new_tokens=8, speculative=speculative, stopping_criteria=[Call(call)]
    )
    assert len(messages) == 2
    assert all("called from outside" in m and "second copy" in m for m in messages)
    assert torch.equal(out, target.generate(IDS, do_sample=False, max_new_tokens=8))


def test_an_eagle4_call_inside_another_one_disturbs_neither(target):
    model = Eagle4ForCausalLM(target, small_drafter(target))
    inner = []

    def call():
        inner.append(model.generate(IDS[:, :2], speculative="eagle4", max_new_tokens=6))

    out = model.generate(
        IDS, max_new_tokens=8, speculative="eagle4", stopping_criteria=[Call(call)]
    )
    assert torch.equal(out, target.generate(IDS, do_sample=False, max_new_tokens=8))
    plain = target.generate(IDS[:, :2], do_sample=False, max_new_tokens=6)
    assert torch.equal(inner[0], plain)
