"""Catches: a model that is not as it was after a generation or an error in one (tensors, hooks,
attention choice, training mode; invariant 10, L1, L2), parts that stop fitting together after
`.to`, a drafter for another target accepted, Transformers' own entry points (forward, embeddings,
Auto classes) that behave otherwise than the target's.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from scripted import Liar, ScriptedModel, continuations, small_drafter
from tiny import tiny_llama, tiny_tokenizer
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from eagle4 import Eagle4Config, Eagle4Drafter, Eagle4ForCausalLM
from tests.engine.compare import VOCAB, assert_identical, eagle, plain, prompt

NEW = 8


@pytest.fixture
def small():
    """A target and a model of its own."""
    target = tiny_llama(vocab=VOCAB, layers=2)
    return target, Eagle4ForCausalLM(target, small_drafter(target))


def hooks_of(model: torch.nn.Module) -> list[int]:
    return [
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    ]


def snapshot(model: Eagle4ForCausalLM) -> dict:
    """Everything about a model that a generation must leave alone."""
    return {
        "hooks": hooks_of(model),
        "attention": [model.config._attn_implementation, model.target.config._attn_implementation],
        "config": model.target.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "target generation": model.target.generation_config.to_dict(),
        "training": [module.training for module in model.modules()],
        "forwards": ["forward" in vars(module) for module in model.modules()],
        "attributes": sorted(vars(model.target)),
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }


def assert_unchanged(before: dict, after: dict) -> None:
    for name in set(before) - {"weights"}:
        assert before[name] == after[name], name
    for name, value in before["weights"].items():
        assert torch.equal(value, after["weights"][name]), name


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class Breaking(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 8:
            raise RuntimeError("broke")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_fifty_generations_leave_everything_as_it_was(small):
    """Every fifth one fails half-way; modes, batches and outputs vary."""
    _, model = small
    model.train()  # a user may forget eval(); it is restored, too
    inputs = [prompt([5]), prompt([3, 6])]
    outputs = dict(return_dict_in_generate=True, output_scores=True, output_hidden_states=True)

    def call(number: int) -> None:
        kwargs = dict(max_new_tokens=4, speculative=None if number % 3 == 0 else "eagle4")
        kwargs |= outputs if number % 4 == 0 else {}
        if number % 5 == 0:
            stop = StoppingCriteriaList([Breaking()])
            with pytest.raises(RuntimeError, match="broke"):
                eagle(model, prompt([7]), **kwargs, stopping_criteria=stop)
        else:
            eagle(model, inputs[number % 2], **kwargs)

    for number in range(6):
        call(number)
    model.last_speculation = None
    before, count = snapshot(model), live_tensors()
    for number in range(50):
        call(number)
    model.last_speculation = None
    assert live_tensors() == count
    assert_unchanged(before, snapshot(model))


def test_a_failing_drafter_leaves_everything_as_it_was(small):
    target, model = small
    inputs = prompt([5])
    model.generate(**inputs, max_new_tokens=2, speculative="eagle4", do_sample=False)
    before = snapshot(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle4Drafter, "propose", lambda *args: 1 / 0)
        eagle(model, inputs, max_new_tokens=4)
        assert model.last_speculation.fallbacks
    assert_unchanged(before, snapshot(model))


def test_the_target_alone_works_between_and_during_nothing(small):
    """Plain forwards and generations of the target are untouched by the attached drafter."""
    target, model = small
    ids = prompt([6])["input_ids"]
    fresh = tiny_llama(vocab=VOCAB, layers=2)
    for _ in range(2):
        assert torch.equal(target(ids).logits, fresh(ids).logits)
        assert torch.equal(model(input_ids=ids).logits, fresh(ids).logits)
        eagle(model, prompt([6]), max_new_tokens=4)
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, fresh(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_changing_the_dtype_keeps_the_pair_together(small, dtype):
    target, model = small
    inputs = prompt([6, 2])
    assert_identical(model, inputs, max_new_tokens=NEW)
    model.to(dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    out = eagle(model, inputs, max_new_tokens=NEW)
    stats = model.last_speculation
    assert not stats.fallbacks and stats.rounds > stats.plain_rounds
    assert out.shape == (2, 6 + NEW)
    if dtype == torch.float64:
        assert out.tolist() == plain(model, inputs, max_new_tokens=NEW).tolist()
    model.float()
    assert_identical(model, inputs, max_new_tokens=NEW)


def test_attaching_changes_no_weight(tmp_path):
    target = tiny_llama()
    Eagle4Drafter(Eagle4Config.for_target(target.config)).save_pretrained(tmp_path)
    drafter = Eagle4Drafter.from_pretrained(tmp_path)
    before = [{n: t.clone() for n, t in part.state_dict().items()} for part in (target, drafter)]
    Eagle4ForCausalLM(target, drafter)
    for part, weights in zip((target, drafter), before, strict=True):
        for name, tensor in part.state_dict().items():
            assert torch.equal(tensor, weights[name]), name


def test_packed_weights_follow_the_weights():
    """Layers large enough to be packed: changed in place, cast there and back, reloaded."""
    target = tiny_llama(vocab=VOCAB, layers=2, hidden=256)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    inputs = prompt([6, 2])
    assert_identical(model, inputs, max_new_tokens=NEW)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(-1.1)
    assert_identical(model, inputs, max_new_tokens=NEW)
    model.to(torch.bfloat16).to(torch.float32)
    assert_identical(model, inputs, max_new_tokens=NEW)
    other = tiny_llama(vocab=VOCAB, layers=2, hidden=256, seed=4)
    target.load_state_dict(other.state_dict())
    assert_identical(model, inputs, max_new_tokens=NEW)
    target.load_state_dict(tiny_llama(vocab=VOCAB, layers=2, hidden=256).state_dict(), assign=True)
    assert_identical(model, inputs, max_new_tokens=NEW)


def test_two_models_share_one_target(small):
    target, first = small
    second = Eagle4ForCausalLM(target, small_drafter(target, seed=5))
    inputs = prompt([6])
    for _ in range(2):
        assert_identical(first, inputs, max_new_tokens=NEW)
        assert_identical(second, inputs, max_new_tokens=NEW)


def test_a_copy_is_independent(small):
    _, model = small
    twin = copy.deepcopy(model)
    inputs = prompt([6])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_identical(twin, inputs, max_new_tokens=NEW)
    assert twin.last_speculation.rounds > twin.last_speculation.plain_rounds


def test_tied_targets(small):
    target = tiny_llama(vocab=VOCAB, layers=2, tie_word_embeddings=True)
    model = Eagle4ForCausalLM(target, small_drafter(target))
    assert_identical(model, prompt([6, 2]), max_new_tokens=NEW)
    inner = model.target
    assert inner.lm_head.weight is inner.model.embed_tokens.weight


def test_what_transformers_asks_a_causal_lm_for(small):
    target, model = small
    assert model.get_input_embeddings() is target.get_input_embeddings()
    assert model.get_output_embeddings() is target.get_output_embeddings()
    assert model.get_decoder() is target.get_decoder()
    assert model.device == target.device and model.dtype == target.dtype
    assert model.can_generate()
    assert model.config.get_text_config(decoder=True).vocab_size == VOCAB
    assert model.main_input_name == "input_ids"


def test_a_target_that_samples_by_default_keeps_its_defaults():
    target = tiny_llama(vocab=VOCAB, layers=2)
    target.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, max_new_tokens=6, pad_token_id=0, eos_token_id=[3, 4]
    )
    model = Eagle4ForCausalLM(target, small_drafter(target))
    inputs = prompt([5])
    outs = [model.generate(**inputs, seed=s, speculative=None).tolist() for s in range(6)]
    assert outs == [
        model.generate(**inputs, seed=s, speculative="eagle4").tolist() for s in range(6)
    ]
    assert len({str(out) for out in outs}) > 1, "the checkpoint's own settings say: sample"
    named = dict(do_sample=True, temperature=0.7, max_new_tokens=6, eos_token_id=[3, 4])
    assert model.generate(**inputs, seed=0, **named).tolist() == outs[0]
    got = model.generate(**inputs, speculative="eagle4", do_sample=False)
    assert got.tolist() == target.generate(**inputs, do_sample=False).tolist()
    assert not hasattr(target.generation_config, "speculative"), "the target is the user's"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 25}, "vocabulary"),
        ({"num_target_layers": 3, "tap_layers": [0]}, "number of target layers"),
        ({"target_hidden_size": 16}, "width of the tapped features"),
        ({"tokenizer_fingerprint": "0" * 64}, "tokenizer"),
    ],
)
def test_a_drafter_for_another_target_is_refused(overrides, message):
    target = tiny_llama(vocab=VOCAB, layers=2)
    settings = {"candidate_rank": 8, "num_candidates": 8, **overrides}
    drafter = Eagle4Drafter(Eagle4Config.for_target(target.config, **settings))
    with pytest.raises(ValueError, match=message):
        Eagle4ForCausalLM(target, drafter, tiny_tokenizer(VOCAB))


def test_the_scripted_seam_is_the_one_that_the_engine_uses(small):
    """Tests inject drafts through `_speculation`; the shipped class goes the same way."""
    target, model = small
    inputs = prompt([5])
    scripted = ScriptedModel(target, Liar(continuations(target, inputs, max_new_tokens=20), VOCAB))
    eagle(scripted, inputs, max_new_tokens=4)
    assert scripted.last_speculation.draft_calls == 0
    eagle(model, inputs, max_new_tokens=4)
    assert model.last_speculation.draft_calls > 0
