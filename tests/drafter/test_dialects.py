"""Catches: a configuration key that nobody reads, a key that is lost when it is written, and a
structure that this drafter does not have.
"""

from __future__ import annotations

import pytest
import torch

from eagle4.config import Eagle4Config
from eagle4.drafter.dialects import read_config, write_config
from tests.drafter.drafter_files import (
    HIDDEN,
    LAYERS,
    VOCAB,
    eagle3_config,
    eagle4_config,
    tensors_for,
)

IDS = "eagle_aux_hidden_state_layer_ids"


def read(config, tensors=None, **arguments):
    return read_config(config, tensors_for(config) if tensors is None else tensors, **arguments)


# Keys of other projects that do change the drafter, and plain inventions.
@pytest.mark.parametrize("config", [eagle3_config(), eagle4_config()], ids=["eagle3", "eagle4"])
@pytest.mark.parametrize(
    "key",
    [
        "norm_before_residual",
        "norm_before_fc",
        "lm_head_rank_divisor",
        "parallel_drafting",
        "mask_token_id",
        "num_depths",
        "use_moe",
        "n_routed_experts",
        "kv_lora_rank",
        "quantization_config",
        "speculators_model_type",
        "partial_rotary_factor",
        "candidate_head",
        "_private",
        "Hidden_size",
    ],
)
@pytest.mark.parametrize("value", [True, None])
def test_every_unknown_key_is_named(config, key, value):
    with pytest.raises(ValueError, match=f"unknown keys.*{key}"):
        read({**config, key: value}, tensors_for(config))


def test_unknown_keys_are_named_together_and_inside_eagle_config():
    config = eagle3_config(zzz=1, aaa=2, eagle_config={"use_other_norm": True})
    with pytest.raises(ValueError, match=r"\['aaa', 'zzz', 'eagle_config.use_other_norm'\]"):
        read(config)


@pytest.mark.parametrize(
    "key", ["eh_proj", "attn_norm", "use_rope", "candidate_rank", "own_lm_head"]
)
def test_eagle4_keys_are_unknown_to_eagle3(key):
    with pytest.raises(ValueError, match=f"unknown keys.*{key}"):
        read(eagle3_config(**{key: True}))


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"]
)
@pytest.mark.parametrize("is_null", [False, True])
def test_required_keys_are_named(key, is_null):
    whole = eagle3_config()
    config = {**whole, key: None} if is_null else {k: v for k, v in whole.items() if k != key}
    with pytest.raises(ValueError, match=f"missing keys.*{key}"):
        read(config, tensors_for(whole))


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        {"architectures": ["Eagle3Speculator"]},
        {"architectures": ["LlamaForCausalLMEagle3", "LlamaForCausalLM"]},
        {"architectures": "LlamaForCausalLMEagle3"},
        {"architectures": []},
        {"model_type": "qwen3"},
        {"model_type": None},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 32},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
        {"eagle_config": {"use_last_layernorm": False}},
        {"eagle_config": {"use_mtp_layernorm": True}},
        {"eagle_config": [1]},
        {"hidden_act": "nonsense"},
        {"hidden_act": None, "rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1e-5},
        {"attention_bias": "yes"},
        {"fc_norm": 1},
        {"norm_output": "true"},
        {"num_key_value_heads": 3},
        {"tokenizer_fingerprint": 7},
    ],
    ids=str,
)
def test_other_structures_are_refused(change):
    with pytest.raises(ValueError):
        read(eagle3_config(**change), tensors_for(eagle3_config()))


def test_neutral_keys_of_training_frameworks_are_accepted():
    extra = dict(
        torch_dtype="bfloat16",
        dtype="bfloat16",
        transformers_version="4.57.1",
        initializer_range=0.02,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=[2, 3],
        pad_token_id=0,
        pretraining_tp=1,
        use_cache=True,
        max_window_layers=36,
        tie_word_embeddings=False,
        bias=False,
        eagle_config={
            IDS: [1, 3, 5],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    )
    assert read(eagle3_config(**extra)) == read(eagle3_config())


def test_absent_keys_mean_what_llama_means():
    config = eagle3_config()
    for key in ("head_dim", "num_key_value_heads", "hidden_act", "max_position_embeddings"):
        del config[key]
    read_back = read(config)
    assert read_back.num_key_value_heads == config["num_attention_heads"]
    assert read_back.head_dim == HIDDEN // config["num_attention_heads"]
    assert (read_back.hidden_act, read_back.max_position_embeddings) == ("silu", 2048)


def test_eagle4_structure_without_keys_follows_the_tensors():
    config = eagle4_config()
    wide = read(config, tensors_for(config, rank=5))
    assert not wide.eh_proj and not wide.attn_norm and wide.candidate_rank == 5
    assert wide.norm_output and wide.num_candidates == 128
    narrow = read(config, tensors_for(config, eh_proj=True, embed=True, head=False))
    assert narrow.eh_proj and narrow.attn_norm and narrow.candidate_rank == 0
    assert narrow.own_embed_tokens and not narrow.own_lm_head
    normed = read(config, tensors_for({**config, "fc_norm": True}))
    assert normed.fc_norm and not wide.fc_norm


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"eh_proj": False, "candidate_rank": 0},
        {"use_rope": False, "sliding_window": None, "norm_output": False, "fc_norm": False},
        {"attn_norm": False, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
        {"tap_layers": [0, 8], "num_candidates": 3, "tokenizer_fingerprint": "abc"},
        {"target_hidden_size": 48, "own_embed_tokens": True, "own_lm_head": True},
        {"draft_vocab_size": 20, "own_lm_head": True, "candidate_rank": 0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 77.0}},
        {"hidden_act": "gelu", "rms_norm_eps": 1e-6, "max_position_embeddings": 99},
    ],
    ids=str,
)
def test_written_keys_alone_rebuild_the_configuration(overrides):
    config = Eagle4Config(
        **{
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "vocab_size": VOCAB,
            "num_target_layers": LAYERS,
            **overrides,
        }
    )
    # No tensor helps: own files name their whole structure.
    assert read_config(write_config(config, "float32"), {"fc.weight": torch.zeros(1)}) == config
