"""Catches: a broken drafter, failed taps or non-finite drafts that stop or change a request
(invariant 8), a fallback that is silent, logged over and over or not counted, drafts that go on
after a failure, half-written draft state that a later turn trusts.
"""

from __future__ import annotations

import logging

import pytest
import torch
from scripted import ScriptedModel, continuations, small_drafter

from eagle4 import Eagle4ForCausalLM
from eagle4.engine.call import CACHE_KEYWORD
from tests.engine.compare import VOCAB, eagle, plain, prompt, shared_target
from tests.engine.test_caches import Checked, script
from tests.engine.test_second_turn import cache_of, longer

NEW = 12


def eagle_model(lengths=(6, 2)) -> Eagle4ForCausalLM:
    target = shared_target()
    return Eagle4ForCausalLM(target, small_drafter(target))


class Breaks:
    """Calls the wrapped function until its n-th call, then fails in the given way."""

    def __init__(self, inner, at: int, how: str):
        self.inner, self.at, self.how, self.calls = inner, at, how, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls < self.at:
            return self.inner(*args, **kwargs)
        if self.how == "raises":
            raise MemoryError("no room for the draft")
        if self.how == "nan":
            out = self.inner(*args, **kwargs)
            return type(out)(*(torch.full_like(part, torch.nan) for part in out))
        return None  # a tap that is missing


def assert_falls_back(model, inputs, caplog, reason: str, **kwargs):
    wanted = plain(model, inputs, max_new_tokens=NEW)
    with caplog.at_level(logging.WARNING, logger="eagle4"):
        out = eagle(model, inputs, max_new_tokens=NEW, return_dict_in_generate=True, **kwargs)
    assert out.sequences.tolist() == wanted.tolist()
    stats = out.speculation
    assert sum(stats.fallbacks.values()) == 1
    (why,) = stats.fallbacks
    assert reason in why
    warnings = [r for r in caplog.records if r.name == "eagle4"]
    assert len(warnings) == 1 and reason in warnings[0].getMessage()
    assert stats.to_dict()["fallbacks"] == {why: 1}
    return out


@pytest.mark.parametrize("first", [1, 2, 9])
@pytest.mark.parametrize(
    ("how", "reason"), [("raises", "no room for the draft"), ("nan", "not finite")]
)
def test_a_drafter_that_breaks(monkeypatch, caplog, how, reason, first):
    """In the first forward, in mid-tree of the first round, and a few rounds later."""
    inputs = prompt([6, 2])
    model = eagle_model()
    broken = Breaks(model.drafter.forward, first, how)
    monkeypatch.setattr(model.drafter, "forward", broken)
    out = assert_falls_back(model, inputs, caplog, reason, speculative={"max_depth": 3})
    assert broken.calls == first, "drafting went on"
    stats = out.speculation
    assert stats.plain_rounds > 0 and (stats.plain_rounds < stats.rounds) == (first > 4)


@pytest.mark.parametrize("round_number", [1, 3])
def test_a_draft_that_raises(caplog, round_number):
    inputs = prompt([6, 2])
    target = shared_target()
    known = continuations(target, inputs, max_new_tokens=40)
    model = ScriptedModel(target, Breaks(script("liar", known), round_number, "raises"))
    out = assert_falls_back(model, inputs, caplog, "no room for the draft")
    assert out.speculation.rounds - out.speculation.plain_rounds == round_number - 1


@pytest.mark.parametrize("at", [1, 2, 4])
def test_taps_that_fail(monkeypatch, caplog, at):
    """In the prefill, in a later row's prefill, and in the second round."""
    inputs = prompt([6, 2])
    model = eagle_model()
    broken = Breaks(model.adapter._features, at, "missing")
    monkeypatch.setattr(model.adapter, "_features", broken)
    assert_falls_back(model, inputs, caplog, "taps")


def test_non_finite_weights(caplog):
    inputs = prompt([6, 2])
    target = shared_target()
    drafter = small_drafter(target)
    with torch.no_grad():
        drafter.fc.weight[3, 5] = torch.nan
    model = Eagle4ForCausalLM(target, drafter)
    out = assert_falls_back(model, inputs, caplog, "not finite")
    assert out.speculation.rounds == out.speculation.plain_rounds


def test_only_the_call_that_failed_is_plain(monkeypatch, caplog):
    inputs = prompt([6, 2])
    model = eagle_model()
    with monkeypatch.context() as patch:
        patch.setattr(model.drafter, "forward", Breaks(model.drafter.forward, 3, "raises"))
        assert_falls_back(model, inputs, caplog, "no room")
    eagle(model, inputs, max_new_tokens=NEW)
    stats = model.last_speculation
    assert not stats.fallbacks and stats.plain_rounds == 0


@pytest.mark.parametrize("how", ["raises", "nan"])
@pytest.mark.parametrize("first", [1, 3])
def test_the_next_turn_does_not_trust_half_a_draft(monkeypatch, how, first):
    """The drafter breaks in its catch-up, in chunks, and the returned cache goes into a second turn
    that checks draft K/V and features against a fresh prefill."""
    monkeypatch.setattr("eagle4.engine.drafting.CHUNK", 3)
    target = shared_target()
    drafter = small_drafter(target)
    model = Eagle4ForCausalLM(target, drafter)
    inputs = prompt([9, 4])
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "forward", Breaks(drafter.forward, first, how))
        out = eagle(model, inputs, max_new_tokens=NEW, return_dict_in_generate=True)
        assert out.speculation.fallbacks
    whole = longer(inputs, out.sequences)
    checked = ScriptedModel(target, Checked(target, drafter, None), drafter)
    got = eagle(checked, whole, max_new_tokens=NEW, **{CACHE_KEYWORD: cache_of(out)})
    assert not checked.last_speculation.fallbacks, checked.last_speculation.fallbacks
    assert got.tolist() == plain(model, whole, max_new_tokens=NEW).tolist()


def test_without_a_drafter_every_call_is_plain():
    model = Eagle4ForCausalLM(shared_target(), None)
    inputs = prompt([6, 2])
    out = eagle(model, inputs, max_new_tokens=NEW)
    assert out.tolist() == plain(model, inputs, max_new_tokens=NEW).tolist()
    stats = model.last_speculation
    assert stats.rounds == stats.plain_rounds and stats.draft_calls == 0


def test_interrupting_is_not_a_fallback(monkeypatch):
    model = eagle_model()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.drafter, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        eagle(model, prompt([5]), max_new_tokens=NEW)
    monkeypatch.undo()
    inputs = prompt([5])
    out = eagle(model, inputs, max_new_tokens=NEW)
    assert out.tolist() == plain(model, inputs, max_new_tokens=NEW).tolist()


def test_drafted_tokens_outside_the_vocabulary_are_a_fallback(caplog):
    """A hostile draft must not reach the target's embedding."""
    inputs = prompt([5])
    target = shared_target()
    known = continuations(target, inputs, max_new_tokens=40)

    class Outside:
        def __init__(self):
            self.script = script("oracle", known)

        def __call__(self, *args):
            tree = self.script(*args)
            return tree._replace(token_BN=tree.token_BN + VOCAB)

    model = ScriptedModel(target, Outside())
    assert_falls_back(model, inputs, caplog, "vocabulary")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_memory_for_a_tree(monkeypatch, caplog, error):
    """Verification of the roots alone still fits: the round is repeated plainly."""
    inputs = prompt([6, 2])
    model = eagle_model()
    forward, trees = model.adapter.forward, []

    def small(token_R, step, pool, keep=None, *args, **kwargs):
        if keep is None and len(token_R) > 2:
            trees.append(len(token_R))
            raise error
        return forward(token_R, step, pool, keep, *args, **kwargs)

    monkeypatch.setattr(model.adapter, "forward", small)
    out = assert_falls_back(model, inputs, caplog, str(error))
    assert len(trees) == 1 and out.speculation.plain_rounds == out.speculation.rounds


def test_other_errors_of_the_target_are_not_hidden(monkeypatch):
    inputs, model = prompt([6]), eagle_model()
    forward = model.adapter.forward

    def broken(token_R, step, pool, keep=None, *args, **kwargs):
        if keep is None:
            raise RuntimeError("a fault of the target")
        return forward(token_R, step, pool, keep, *args, **kwargs)

    monkeypatch.setattr(model.adapter, "forward", broken)
    with pytest.raises(RuntimeError, match="a fault of the target"):
        eagle(model, inputs, max_new_tokens=4)
