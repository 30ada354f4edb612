"""Catches: a model that cannot verify packed rows but is accepted, crashes late, or is refused
without saying what is missing.
"""

from __future__ import annotations

import pytest
import zoo
from transformers import AutoModel, T5Config, T5ForConditionalGeneration

from eagle4 import Eagle4ForCausalLM
from eagle4.target import TargetAdapter, check_target

_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0}
_LONGROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {**_ROPE, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "num_key_value_heads": None}
_ZAMBA2 = {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]}
REFUSED = {
    "bloom": ({"n_layer": 2, "n_head": 4, "num_hidden_layers": None}, "ALiBi"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2}, "ALiBi"),
    "falcon": ({"alibi": True, "num_key_value_heads": None}, "ALiBi"),
    "mamba": ({"num_key_value_heads": None}, "recurrent layers that decay every channel"),
    "jamba": ({"num_experts": 2}, "recurrent layers that decay every channel"),
    "mamba2": (_MAMBA2, "recurrent layers alone"),
    "zamba2": (_ZAMBA2, "recurrent layers have no packed form.*'qwen3_next'"),
    "minimax": (
        {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
        r"layer types \['linear_attention'\]",
    ),
    "llama4_text": (
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64},
        "chunked attention",
    ),
    "phi3": (_LONGROPE, "longrope .* position 32"),
    # Nothing marks these two but what their attention does.
    "stablelm": ({}, "does not hand keyword arguments"),
    "nemotron": ({}, "does not hand keyword arguments"),
}
_NO_SDPA = ("bloom", "mpt", "mamba", "mamba2")


def build(model_type: str, settings: dict):
    return zoo.build_model(
        **{**zoo.SIZES, "model_type": model_type, **settings},
        attention="eager" if model_type in _NO_SDPA else None,
    )


@pytest.mark.parametrize("model_type", list(REFUSED))
def test_a_family_is_refused_by_name_with_what_is_missing(model_type):
    settings, reason = REFUSED[model_type]
    target = build(model_type, settings)
    with pytest.raises(ValueError, match=rf"{type(target).__name__} .*'{model_type}'.*{reason}"):
        TargetAdapter(target)
    # The refusal left the model as it was.
    assert target.config._attn_implementation != "eagle4"
    assert not any(module._forward_hooks for module in target.modules())


def test_attaching_refuses_before_any_token():
    with pytest.raises(ValueError, match="bloom.*ALiBi"):
        Eagle4ForCausalLM(build(*("bloom", REFUSED["bloom"][0])))


def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=zoo.VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration.*encoder-decoder"):
        check_target(T5ForConditionalGeneration(config))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="LlamaModel.*no LM head.*AutoModelForCausalLM"):
        check_target(AutoModel.from_config(zoo.build("llama").config))


def test_longrope_is_accepted_where_it_cannot_switch():
    target = build("phi3", _LONGROPE)
    target.config.max_position_embeddings = 32
    check_target(target)
