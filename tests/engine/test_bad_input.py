"""Catches: broken logits or processors that speculation survives, reports as something else than
plain decoding does, or after which hooks, caches or the object are unusable (Q2, A5).
"""

from __future__ import annotations

import pytest
import torch
from scripted import Oracle as Script
from scripted import ScriptedModel, small_drafter
from tiny import tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList

from eagle4 import Eagle4ForCausalLM
from tests.engine.compare import VOCAB, prompt, shared_target

NEW = 12
MODES = [
    dict(do_sample=False),
    dict(do_sample=True, seed=3),
    dict(do_sample=True, seed=3, top_k=0, top_p=0.9),
]


class Breaks(LogitsProcessor):
    """Behaves until the history has ``length`` tokens, then does ``what``."""

    def __init__(self, what, length: int):
        self.what, self.length = what, length

    def __call__(self, input_ids, scores):
        return self.what(scores) if input_ids.shape[1] >= self.length else scores


def raise_error(scores):
    raise KeyError("out of order")


def with_value(value: float):
    def spoil(scores):
        scores = scores.clone()
        scores[:, 3] = value
        return scores

    return spoil


FAULTS = {
    "raises": raise_error,
    "nan": with_value(float("nan")),
    "inf": with_value(float("inf")),
    "masks everything": lambda scores: torch.full_like(scores, float("-inf")),
    "one dimension": lambda scores: scores[0],
    "two rows": lambda scores: scores.repeat(2, 1),
    "three dimensions": lambda scores: scores[None],
    "nothing": lambda scores: None,
}


def attempt(generate, inputs, **kwargs):
    try:
        return generate(**inputs, max_new_tokens=NEW, pad_token_id=0, **kwargs).tolist()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("mode", MODES, ids=["greedy", "sampled", "top p"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [5, 8])
def test_the_same_exception_as_without_speculation(fault, mode, at):
    """At the first token and in the middle of an accepted path; then the model works as before."""
    inputs = prompt([5])
    target = shared_target()
    small = Eagle4ForCausalLM(target, small_drafter(target))
    healthy = small.generate(**inputs, max_new_tokens=40, pad_token_id=0, **mode)
    model = ScriptedModel(target, Script([healthy[0].tolist()], VOCAB))
    broken = dict(logits_processor=LogitsProcessorList([Breaks(FAULTS[fault], at)]))
    own = {name: value for name, value in mode.items() if name != "seed"}
    hooks = [len(module._forward_hooks) for module in target.modules()]
    found = {
        "transformers": attempt(target.generate, inputs, **own, **broken),
        "plain": attempt(small.generate, inputs, speculative=None, **mode, **broken),
        "random drafts": attempt(small.generate, inputs, speculative="eagle4", **mode, **broken),
        "right drafts": attempt(model.generate, inputs, speculative="eagle4", **mode, **broken),
    }
    if mode["do_sample"]:
        assert isinstance(found["transformers"], type)
        if fault == "nothing":  # which attribute of None is missed first is no contract
            found.pop("transformers")
    elif isinstance(found["transformers"], list):  # argmax of NaN is a token to Transformers
        assert fault in ("nan", "inf", "masks everything")
    assert len(set(map(str, found.values()))) == 1, found
    assert [len(module._forward_hooks) for module in target.modules()] == hooks
    for again in (small, model):
        got = again.generate(**inputs, speculative="eagle4", max_new_tokens=NEW, **mode)
        assert got.tolist() == healthy[:, : 5 + NEW].tolist()


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_logits_of_the_target_that_are_no_numbers(sampling):
    target = tiny_llama(vocab=VOCAB, layers=2)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    inputs, mode = prompt([5]), dict(do_sample=True, max_new_tokens=4, pad_token_id=0)
    healthy = model.generate(**inputs, seed=1, **mode).tolist()
    saved = target.lm_head.weight.detach().clone()
    with torch.no_grad():
        target.lm_head.weight.mul_(float("nan"))
    messages = set()
    for generate, kwargs in (
        (target.generate, {}),
        (model.generate, {"speculative": None}),
        (model.generate, {"speculative": {"sampling": sampling}}),
    ):
        with pytest.raises(RuntimeError) as caught:
            generate(**inputs, **mode, **kwargs)
        messages.add(str(caught.value))
    assert len(messages) == 1
    with torch.no_grad():
        target.lm_head.weight.copy_(saved)
    again = model.generate(**inputs, seed=1, speculative={"sampling": "coupled"}, **mode)
    assert again.tolist() == healthy


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_a_cache_survives_a_call_that_fails(sampling):
    target = shared_target()
    model = Eagle4ForCausalLM(target, small_drafter(target))
    mode = dict(do_sample=True, seed=2, speculative={"sampling": sampling})
    whole = model.generate(**prompt([5]), max_new_tokens=16, **mode)
    out = model.generate(**prompt([5]), max_new_tokens=6, return_dict_in_generate=True, **mode)
    cache, ids = out.past_key_values, out.sequences
    broken = LogitsProcessorList([Breaks(raise_error, 13)])
    with pytest.raises(KeyError):
        model.generate(
            ids, max_new_tokens=10, past_key_values=cache, logits_processor=broken, **mode
        )
    again = model.generate(ids, max_new_tokens=10, past_key_values=cache, **mode)
    if sampling == "coupled":
        assert again.tolist() == whole.tolist()
    assert again.shape == whole.shape


def test_a_drafter_with_nan_below_the_root_draws_nothing_there(monkeypatch):
    """Whether a node gets children is decided before they are drawn; the request goes on."""
    target = shared_target()
    model = Eagle4ForCausalLM(target, small_drafter(target))
    propose = model.drafter.propose
    rows = []

    def spoilt(head_RH, top_k):
        found = propose(head_RH, top_k)
        rows.append(len(rows))
        if len(rows) % 3 == 2:
            found = found._replace(logp_RK=found.logp_RK * float("nan"))
        return found

    monkeypatch.setattr(model.drafter, "propose", spoilt)
    mode = dict(do_sample=True, seed=2, speculative={"sampling": "rejection", "max_depth": 3})
    out = model.generate(**prompt([5]), max_new_tokens=10, **mode)
    assert out.shape == (1, 15) and len(rows) > 3


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_a_drafter_that_is_broken_ends_speculation_not_the_request(monkeypatch, sampling):
    target = shared_target()
    model = Eagle4ForCausalLM(target, small_drafter(target))
    mode = dict(do_sample=True, seed=2, max_new_tokens=10)
    wanted = model.generate(**prompt([5]), **mode)
    with torch.no_grad():
        model.drafter.fc.weight.fill_(float("nan"))
    got = model.generate(**prompt([5]), speculative={"sampling": sampling}, **mode)
    assert got.tolist() == wanted.tolist()
    assert sum(model.last_speculation.fallbacks.values()) == 1
