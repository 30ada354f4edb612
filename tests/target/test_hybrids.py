"""Catches: a hybrid of attention and recurrent layers whose packed greedy output is not plain
Transformers' own, token for token, whatever the draft; state that leaks between branches, rows of
the batch or calls; prompts around the convolution's width and the chunk size; mixers that stay
replaced afterwards.

Every row of a batch is compared with its own unpadded `generate`, so that padding cannot play a
part on both sides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import zoo
import zoo_hybrid
from packed import Packer, Rows, chain, plain_logits
from scripted import Liar, Mixed, Oracle, ScriptedModel, small_drafter, unpadded
from transformers import PreTrainedModel
from zoo import VOCAB

from eagle4 import Eagle4ForCausalLM
from eagle4.target import TargetAdapter
from eagle4.target.families import HYBRID

NEW = 24
RANDOM = {"max_depth": 2, "top_k": 2, "max_nodes": 4, "harness": False}
SCRIPT = {"max_depth": 6, "top_k": 2, "max_nodes": 12}
PROMPT = [5, 17, 3, 60, 41, 8, 77, 29, 90, 12, 33, 64, 2, 51, 19]
TREE = Rows(0, len(PROMPT), [7, 30, 31, 55, 9], [-1, 0, 0, 1, 2])
PATHS = ([0, 1, 3], [0, 2, 4])


class Hybrid(NamedTuple):
    name: str
    target: PreTrainedModel
    inputs: dict[str, torch.Tensor]  # a left-padded batch of 5, 8 and 19 tokens
    expected: list[list[int]]  # rows alone, unpadded, plain Transformers


def alone(ids: list[int]) -> dict[str, torch.Tensor]:
    """One prompt without padding; a generated token may have the padding's id."""
    row = torch.tensor([ids])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


def rows_alone(target, inputs: dict[str, Any], **kwargs: Any) -> list[list[int]]:
    """Every row's unpadded prompt and greedy continuation from its own call."""
    kwargs = {"do_sample": False, "max_new_tokens": NEW, **kwargs}
    prompts = unpadded(inputs["input_ids"], inputs)
    return [target.generate(**alone(ids), **kwargs)[0].tolist() for ids in prompts]


def generated(model, inputs: dict[str, Any], **kwargs: Any) -> list[list[int]]:
    kwargs = {"do_sample": False, "max_new_tokens": NEW, **kwargs}
    inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    return unpadded(model.generate(**inputs, **kwargs), inputs)


@pytest.fixture(scope="module", params=list(zoo_hybrid.HYBRIDS))
def hybrid(request) -> Hybrid:
    target, inputs = zoo_hybrid.build(request.param), zoo.prompts()["batch"]
    return Hybrid(request.param, target, inputs, rows_alone(target, inputs))


def test_the_argmax_depends_on_the_context(hybrid):
    """Without this the other tests would pass for a model that ignores what it sees."""
    tails = [row[-NEW:] for row in hybrid.expected]
    assert len({token for row in tails for token in row}) >= 10
    assert len({tuple(row) for row in tails}) == len(tails)


def test_plain_decoding_is_transformers_own(hybrid):
    model = Eagle4ForCausalLM(hybrid.target)
    assert generated(model, hybrid.inputs, speculative=None) == hybrid.expected


def test_a_random_drafter_changes_nothing(hybrid):
    model = Eagle4ForCausalLM(hybrid.target, small_drafter(hybrid.target))
    assert generated(model, hybrid.inputs, speculative=RANDOM) == hybrid.expected
    stats = model.last_speculation
    assert not stats.fallbacks and stats.nodes_verified > NEW


def test_accepted_and_rejected_nodes_change_nothing(hybrid):
    """Every row of the batch accepts another number of nodes."""
    model = ScriptedModel(hybrid.target, Mixed(hybrid.expected, VOCAB, [2, 5, 0]))
    assert generated(model, hybrid.inputs, speculative=SCRIPT) == hybrid.expected
    stats = model.last_speculation
    assert not stats.fallbacks and stats.accept_length > 1.2


def test_tree_rows_are_plain_rows(hybrid):
    plain = torch.empty(len(TREE.tokens), VOCAB)
    for path in PATHS:
        tokens = PROMPT + [TREE.tokens[node] for node in path]
        plain[path] = plain_logits(hybrid.target, tokens)[-len(path) :]
    packer = Packer(hybrid.target)
    packer.run(chain(0, 0, PROMPT), is_prompt=True)
    for _ in range(2):  # the first verification left no trace
        packed = packer.run(TREE).logits_RV
        assert float((packed - plain).abs().max() / plain.std()) < 2e-4


def test_a_recurrent_layer_matters(hybrid):
    """Without the committed state the rows are others."""
    packer = Packer(hybrid.target)
    packer.run(chain(0, 0, PROMPT), is_prompt=True)
    right = packer.run(TREE).logits_RV
    pool = packer.pool.recurrent
    for kept in (pool.conv_LSWC, pool.state_LSHKV):
        if kept.numel():
            before = kept.clone()
            kept.zero_()
            error = (packer.run(TREE).logits_RV - right).abs().max() / right.std()
            assert error > 1e-2
            kept.copy_(before)


def test_every_hybrid_is_proven_here():
    assert {settings["model_type"] for settings in zoo_hybrid.HYBRIDS.values()} == HYBRID


# -- one family of each kind of mixer --------------------------------------------------------------

KINDS = ("qwen3_next", "bamba", "lfm2")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [1, 3, 4, 65, 130])
def test_prompts_around_the_window_and_the_chunk(name, length):
    target = zoo_hybrid.build(name)
    generator = torch.Generator().manual_seed(length)
    inputs = {"input_ids": torch.randint(1, VOCAB, (1, length), generator=generator)}
    expected = rows_alone(target, inputs, max_new_tokens=10)
    for draft in (Oracle(expected, VOCAB), Liar(expected, VOCAB)):
        model = ScriptedModel(target, draft)
        assert generated(model, inputs, speculative=SCRIPT, max_new_tokens=10) == expected
        assert not model.last_speculation.fallbacks


@pytest.mark.parametrize("name", KINDS)
def test_bf16_rows_err_as_plain_bf16_does(name):
    """Inputs and outputs of the mixers in bf16, state in float32."""
    exact, low = zoo_hybrid.build(name), zoo_hybrid.build(name).bfloat16()
    tokens = PROMPT + [TREE.tokens[node] for node in PATHS[0]]
    wanted = plain_logits(exact, tokens)[-3:]
    own = (plain_logits(low, tokens)[-3:].float() - wanted).abs().mean()
    packer = Packer(low)
    packer.run(chain(0, 0, PROMPT), is_prompt=True)
    packed = packer.run(TREE).logits_RV[PATHS[0]]
    assert packed.dtype == torch.bfloat16
    assert (packed.float() - wanted).abs().mean() < 2 * own
    assert packer.pool.recurrent.state_LSHKV.dtype == torch.float32
    assert packer.pool.recurrent.conv_LSWC.dtype == torch.bfloat16


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("depth", [0, 3])
def test_an_eos_inside_an_accepted_block(name, depth):
    """The first row is made to stop at one of its own tokens, deep in a block."""
    target, inputs = zoo_hybrid.build(name), zoo.prompts()["batch"]
    free = rows_alone(target, inputs)
    eos = free[0][5 + 9 + depth]
    rules = {"eos_token_id": eos, "pad_token_id": 0}
    expected = rows_alone(target, inputs, **rules)
    model = ScriptedModel(target, Oracle(free, VOCAB))
    found = generated(model, inputs, speculative=SCRIPT, **rules)
    assert [row[: len(wanted)] for row, wanted in zip(found, expected, strict=True)] == expected
    for row, wanted in zip(found, expected, strict=True):
        assert not any(row[len(wanted) :])
    assert len(expected[0]) <= 5 + 10 + depth and not model.last_speculation.fallbacks


@pytest.mark.parametrize("name", KINDS)
def test_mixers_are_transformers_own_afterwards(name):
    target = zoo_hybrid.build(name)
    ids = torch.tensor([PROMPT])
    before = [sorted(module.__dict__) for module in target.modules()]
    plain = target(ids).logits
    adapter = TargetAdapter(target)
    with pytest.raises(KeyError), adapter.attached():
        mixer = adapter.mixers.mixers[0]
        assert "forward" in mixer.__dict__
        with adapter.attached():
            pass
        assert "forward" in mixer.__dict__, "a nested call took the outer one's away"
        with pytest.raises(RuntimeError, match="called from outside"):
            target(ids)
        raise KeyError
    assert [sorted(module.__dict__) for module in target.modules()] == before
    assert torch.equal(target(ids).logits, plain)


def test_the_time_step_is_limited_where_transformers_limits_it():
    """In prompts, not in decoding (Nemotron-H); a limit this high changes the text."""
    target, inputs = zoo_hybrid.build("nemotron_h", time_step_min=0.3), zoo.prompts()["batch"]
    expected = rows_alone(target, inputs)
    assert expected != rows_alone(zoo_hybrid.build("nemotron_h"), inputs)
    model = ScriptedModel(target, Mixed(expected, VOCAB, [2, 5, 0]))
    assert generated(model, inputs, speculative=SCRIPT) == expected
    assert generated(model, inputs, speculative=None) == expected


def test_a_mixer_that_gets_no_arguments_is_refused(monkeypatch):
    target = zoo_hybrid.build("lfm2")
    mixer = type(target.model.layers[0].conv)
    forward = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda self, hidden_states: forward(self, hidden_states))
    with pytest.raises(ValueError, match="no keyword arguments down to its Lfm2ShortConv; update"):
        TargetAdapter(target)


def test_a_multimodal_model_around_a_hybrid_is_probed():
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**zoo.SIZES, **zoo_hybrid.HYBRIDS["qwen3_5"], "model_type": "qwen3_5_text"}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = Qwen3_5Config(
        text_config=text, vision_config={**vision, "out_hidden_size": 32, "patch_size": 4}
    )
    torch.manual_seed(0)
    target = Qwen3_5ForConditionalGeneration(config).float().eval()
    inputs = {"input_ids": torch.tensor([PROMPT])}
    out = generated(Eagle4ForCausalLM(target), inputs, speculative=None)
    assert out == rows_alone(target, inputs)


def test_a_mixer_that_is_changed_is_refused():
    """A mixer of another class has no packed form."""
    target = zoo_hybrid.build("qwen3_next")
    mixer = target.model.layers[0].linear_attn
    mixer.__class__ = type("MyOwnMixer", (type(mixer),), {})
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM.*recurrent layers \[0\]"):
        TargetAdapter(target)
