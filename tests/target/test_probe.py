"""Catches: an unlisted family that silently decodes something else. The probe must pass what is
right, and refuse what counts rows, mixes rows, windows only through its mask, or selects keys by
arguments that are not understood.
"""

from __future__ import annotations

import pytest
import torch
import zoo
from scripted import Mixed, ScriptedModel, unpadded
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from eagle4 import Eagle4ForCausalLM
from eagle4.target import TargetAdapter
from eagle4.target.families import PROVEN, is_proven

_MOE = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def llama(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    """The tiny Llama's weights in a user's subclass."""
    stock = zoo.build("llama")
    model = kind(stock.config)
    model.load_state_dict(stock.state_dict())
    return model.eval()


class Renamed(LlamaForCausalLM):
    """Nothing is changed; only the class is not Transformers' own."""


class CountsRows(LlamaForCausalLM):
    """Positions are the row numbers of the forward."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if position_ids is not None:
            first = position_ids[:, :1]
            position_ids = first + torch.arange(input_ids.shape[1])
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class MixesRows(LlamaForCausalLM):
    """Every row adds a bit of the row before it, as token-shift layers do."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].register_forward_hook(
            lambda module, args, out: out + 0.1 * out.roll(1, dims=1)
        )


class SelectsKeys(LlamaForCausalLM):
    """Sparse attention: the call carries chosen key indices."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "indices": torch.zeros(1)}),
                with_kwargs=True,
            )


class BypassesTheInterface(LlamaForCausalLM):
    """Attention of its own, whatever is registered."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = _OwnAttention


class _OwnAttention(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        return self.o_proj(self.q_proj(hidden_states)), None


def test_a_subclass_of_a_proven_family_is_probed_and_passes():
    model = llama(Renamed)
    assert not is_proven(model) and is_proven(zoo.build("llama"))
    TargetAdapter(model)
    TargetAdapter(model.train())
    assert model.training


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CountsRows, "differs from a plain one"),
        (MixesRows, "differs from a plain one"),
        (SelectsKeys, r"attention calls pass \['indices'\]"),
        (BypassesTheInterface, "do not call the attention function"),
    ],
)
def test_a_broken_model_is_refused(kind, reason):
    with pytest.raises(ValueError, match=f"{kind.__name__}.*{reason}"):
        TargetAdapter(llama(kind))


@pytest.mark.parametrize("window", [zoo.WINDOW, 400])
def test_a_window_that_only_the_mask_knows_is_refused(window):
    """The second window is longer than the probe; the attention calls give it away."""
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 3}
    target = zoo.build_model(**{**zoo.SIZES, **_MOE, **sliding})
    with pytest.raises(ValueError, match=f"sliding window of {window} for layer 0"):
        TargetAdapter(target)


@pytest.mark.parametrize("settings", [{"model_type": "cohere"}, _MOE], ids=["cohere", "qwen2_moe"])
def test_an_unlisted_family_passes_and_is_identical(settings):
    target = zoo.build_model(**{**zoo.SIZES, **settings})
    assert not is_proven(target)
    inputs = zoo.prompts()["batch"]
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    draft = Mixed(unpadded(expected, inputs), zoo.VOCAB, [2, 5, 0])
    model = ScriptedModel(target, draft)
    out = model.generate(**inputs, speculative={"max_depth": 6}, max_new_tokens=24)
    assert torch.equal(out, expected)
    assert not model.last_speculation.fallbacks


def test_a_multimodal_model_around_a_proven_decoder_is_probed():
    target = zoo.tiny_gemma3_with_vision()
    assert target.config.get_text_config().model_type in PROVEN and not is_proven(target)
    ids = torch.tensor([[4, 9, 3, 7, 8, 2, 1, 5, 11, 12, 13]])
    expected = target.generate(ids, do_sample=False, max_new_tokens=12)
    out = Eagle4ForCausalLM(target).generate(ids, speculative=None, max_new_tokens=12)
    assert torch.equal(out, expected)


def test_a_failing_packed_forward_is_a_refusal_not_a_crash():
    class Crashes(LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            if kwargs.get("attention_mask") is not None:
                raise IndexError("mask shape")
            return super().forward(input_ids=input_ids, **kwargs)

    with pytest.raises(ValueError, match="does not take packed rows: IndexError: mask shape"):
        TargetAdapter(llama(Crashes))
