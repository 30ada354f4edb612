"""Catches: a family whose packed greedy output is not plain Transformers' own, token for token,
whatever the draft; windows, soft caps or sinks that do not reach the attention; rollback after the
window has slid; taps that are not the block outputs.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
import zoo
from packed import Packer, Rows, chain, plain_logits
from scripted import Mixed, ScriptedModel, small_drafter, unpadded
from transformers import PreTrainedModel
from zoo import VOCAB, WINDOW

from eagle4 import Eagle4ForCausalLM
from eagle4.target import TargetAdapter, attention
from eagle4.target.families import PROVEN, declared_windows

NEW = 40
RANDOM = {"max_depth": 2, "top_k": 2, "max_nodes": 4, "harness": False}
SCRIPT = {"max_depth": 6, "top_k": 2, "max_nodes": 12}
# What each layer's attention call must carry; families that are not named have no windows.
WINDOWS = {
    **dict.fromkeys(("mistral", "phi3", "starcoder2", "mixtral"), [WINDOW] * 3),
    "qwen2": [None, WINDOW, WINDOW],
    "gemma3": [WINDOW, WINDOW, None],
    **dict.fromkeys(("qwen3", "gemma2", "gpt_oss", "cohere2", "olmo3"), [WINDOW, None, WINDOW]),
}
OPTIONS = {"gemma2": ["softcap"], "gpt_oss": ["sinks_H"]}
PROMPT = [5, 17, 3, 60, 41, 8, 77, 29, 90, 12, 33, 64, 2, 51, 19]
TREE = Rows(0, len(PROMPT), [7, 30, 31, 55, 9], [-1, 0, 0, 1, 2])
PATHS = ([0, 1, 3], [0, 2, 4])


class Family(NamedTuple):
    name: str
    target: PreTrainedModel
    inputs: dict[str, dict[str, torch.Tensor]]
    expected: dict[str, torch.Tensor]  # plain Transformers, greedy


def without(option: str, function, *args, **kwargs):
    return function(*args, **{**kwargs, option: None})


def generated(model, inputs, **kwargs) -> torch.Tensor:
    return model.generate(**inputs, do_sample=False, max_new_tokens=NEW, **kwargs)


@pytest.fixture(scope="module", params=list(zoo.FAMILIES))
def family(request) -> Family:
    target = zoo.build(request.param)
    inputs = {k: v for k, v in zoo.prompts().items() if k in ("one", "longer", "batch")}
    expected = {name: generated(target, prompt) for name, prompt in inputs.items()}
    return Family(request.param, target, inputs, expected)


def test_the_argmax_depends_on_the_context(family):
    """Without this the other tests would pass for a model that ignores what it sees."""
    rows = family.expected["batch"][:, -NEW:]
    assert len(set(rows.flatten().tolist())) >= 10
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)


@pytest.mark.parametrize("prompt", ["one", "batch"])
def test_plain_decoding_is_transformers_own(family, prompt):
    model = Eagle4ForCausalLM(family.target)
    out = generated(model, family.inputs[prompt], speculative=None)
    assert torch.equal(out, family.expected[prompt])


def test_a_random_drafter_changes_nothing(family):
    model = Eagle4ForCausalLM(family.target, small_drafter(family.target))
    out = generated(model, family.inputs["batch"], speculative=RANDOM)
    assert torch.equal(out, family.expected["batch"])
    stats = model.last_speculation
    assert not stats.fallbacks and stats.nodes_verified > NEW


@pytest.mark.parametrize(
    ("prompt", "right", "accepted"),
    [("one", 3, 4.0), ("longer", 2, 3.0), ("batch", [2, 5, 0], 1.5)],
)
def test_accepted_and_rejected_nodes_change_nothing(family, prompt, right, accepted):
    references = unpadded(family.expected[prompt], family.inputs[prompt])
    rights = [right] if isinstance(right, int) else right
    model = ScriptedModel(family.target, Mixed(references, VOCAB, rights))
    out = generated(model, family.inputs[prompt], speculative=SCRIPT)
    assert torch.equal(out, family.expected[prompt])
    stats = model.last_speculation
    assert not stats.fallbacks and stats.accept_length >= accepted - 0.5


def test_a_row_of_the_batch_is_the_row_alone(family):
    assert torch.equal(family.expected["batch"][2], family.expected["longer"][0])


def test_windows_reach_every_attention_call(family):
    calls: dict = {}
    packer = Packer(family.target)
    packer.run(chain(0, 0, PROMPT), calls=calls)
    found = [calls[layer].sliding_window for layer in sorted(calls)]
    assert found == WINDOWS.get(family.name, [None] * 3)
    assert found == declared_windows(family.target.config.get_text_config(decoder=True))


def test_tree_rows_are_plain_rows_and_every_option_matters(family, monkeypatch):
    options = ["sliding_window"] * (family.name in WINDOWS) + OPTIONS.get(family.name, [])
    plain = torch.empty(len(TREE.tokens), VOCAB)
    for path in PATHS:
        tokens = PROMPT + [TREE.tokens[node] for node in path]
        plain[path] = plain_logits(family.target, tokens)[-len(path) :]

    def error() -> float:
        packer = Packer(family.target)
        packer.run(chain(0, 0, PROMPT))
        packed = packer.run(TREE).logits_RV
        return float((packed - plain).abs().max() / plain.std())

    assert error() < 1e-4
    attend = attention.attend
    for option in options:
        monkeypatch.setattr(attention, "attend", partial(without, option, attend))
        assert error() > 1e-2, f"without {option} nothing changes"


def test_taps_are_block_outputs_and_hidden_states_are_transformers_own(family):
    """Post-block, before the next norm; for the last block, before the final norm."""
    blocks = family.target.config.num_hidden_layers
    packer = Packer(family.target, 2, taps=list(range(blocks)))
    last = []
    hook = packer.adapter.blocks[-1].register_forward_hook(
        lambda module, args, out: last.append((out[0] if isinstance(out, tuple) else out)[0])
    )
    with torch.no_grad():
        plain = family.target(
            input_ids=torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True
        )
    hook.remove()
    other = PROMPT[::-1][:6]
    out = packer.run(chain(1, 0, other), chain(0, 0, PROMPT), all_hidden_states=True)
    for layer in range(blocks):
        wanted = last[0] if layer == blocks - 1 else plain.hidden_states[layer + 1][0]
        tap = out.features_RTH[len(other) :, layer]
        assert torch.allclose(tap, wanted, atol=1e-4 * float(wanted.abs().max())), layer
    assert len(out.hidden_states) == len(plain.hidden_states)
    for packed, wanted in zip(out.hidden_states, plain.hidden_states, strict=True):
        wanted = wanted[0]
        limit = 1e-4 * float(wanted.abs().max())
        assert torch.allclose(packed[len(other) :], wanted, atol=limit)


@pytest.mark.parametrize("name", list(zoo.MORE_FAMILIES))
def test_more_families_are_identical(name):
    """Proven by the batch with accepted and rejected nodes, the richest of the cases above."""
    target, inputs = zoo.build(name), zoo.prompts()["batch"]
    expected = generated(target, inputs)
    references = unpadded(expected, inputs)
    model = ScriptedModel(target, Mixed(references, VOCAB, [2, 5, 0]))
    assert torch.equal(generated(model, inputs, speculative=SCRIPT), expected)
    assert not model.last_speculation.fallbacks and model.last_speculation.accept_length > 1.2
    assert torch.equal(generated(model, inputs, speculative=None), expected)


def test_every_proven_family_is_proven_here():
    tested = {settings["model_type"] for settings in {**zoo.FAMILIES, **zoo.MORE_FAMILIES}.values()}
    assert tested == PROVEN


@pytest.mark.parametrize("taps", [[-1], [0, 3], [0, 1, 7]])
def test_taps_that_do_not_exist_are_named(taps):
    target = zoo.build("llama")
    with pytest.raises(ValueError, match=rf"tap layer {taps[-1]} .*0\.\.2"):
        TargetAdapter(target, taps)
