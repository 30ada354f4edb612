"""Catches: an unknown key that is swallowed, two different drafters that compare equal, a
configuration that Transformers cannot copy, build without arguments or write to JSON, repeated
taps of shallow targets, sizes that do not follow the target.
"""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from eagle4.config import Eagle4Config, SpeculativeConfig, default_tap_layers, structural_keys

SIZES = dict(hidden_size=64, num_attention_heads=4, vocab_size=100, num_target_layers=12)
OTHER = {
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 48,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
    "moe_norm": False,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 99,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0},
    "vocab_size": 101,
    "draft_vocab_size": 40,
    "target_hidden_size": 80,
    "num_target_layers": 13,
    "tap_layers": [0, 2, 4],
    "fc_norm": False,
    "eh_proj": False,
    "attn_norm": False,
    "norm_output": False,
    "use_rope": False,
    "sliding_window": None,
    "candidate_rank": 0,
    "num_candidates": 7,
    "own_embed_tokens": True,
    "own_lm_head": True,
    "attention_bias": True,
    "mlp_bias": True,
    "tokenizer_fingerprint": "abc",
}


def changed(key):
    needs = {"own_lm_head": True, "candidate_rank": 0} if key == "draft_vocab_size" else {}
    return Eagle4Config(**{**SIZES, **needs, key: OTHER[key]})


def test_every_key_has_a_counterpart_here():
    assert set(OTHER) == structural_keys() - {"format_version"}


@pytest.mark.parametrize("key", OTHER)
def test_every_key_tells_configurations_apart_and_survives_copies(key):
    config = changed(key)
    assert config != Eagle4Config(**SIZES) and config == changed(key)
    assert getattr(config, key) == OTHER[key]
    as_json = json.loads(config.to_json_string(use_diff=False))
    as_diff = json.loads(config.to_json_string(use_diff=True))
    for copied in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        Eagle4Config(**config.to_dict()),
        Eagle4Config.from_dict(config.to_dict()),
        Eagle4Config.from_dict(config.to_diff_dict()),
        Eagle4Config.from_dict(as_json),
        Eagle4Config.from_dict(as_diff),
    ):
        assert copied == config and copied.to_dict() == config.to_dict()


def test_transformers_may_build_print_and_store_it(tmp_path):
    config = Eagle4Config()
    assert "eagle4" in repr(config) and config != object() and config != PreTrainedConfig()
    changed("tap_layers").save_pretrained(tmp_path)
    assert Eagle4Config.from_pretrained(tmp_path) == changed("tap_layers")


@pytest.mark.parametrize("key", ["hiden_size", "rope_theta", "num_hidden_layers", "_x", "layers"])
def test_unknown_keys_are_named(key):
    with pytest.raises(ValueError, match=f"unknown.*{key}"):
        Eagle4Config(**{key: 1})
    with pytest.raises(ValueError, match=f"unknown.*{key}"):
        Eagle4Config.for_target(LlamaConfig(), **{key: 1})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tap_layers": [0, 12]}, "tap_layers"),
        ({"tap_layers": [-1, 2]}, "tap_layers"),
        ({"tap_layers": []}, "tap_layers"),
        ({"tap_layers": [3, 3]}, "tap_layers"),
        ({"tap_layers": 3}, "tap_layers"),
        ({"tap_layers": [1.0]}, "tap_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"candidate_rank": -1}, "candidate_rank"),
        ({"num_candidates": 0}, "num_candidates"),
        ({"draft_vocab_size": 40, "own_lm_head": True}, "draft_vocab_size"),
        ({"draft_vocab_size": 40, "candidate_rank": 0}, "own_lm_head"),
        ({"draft_vocab_size": 101, "candidate_rank": 0, "own_lm_head": True}, "vocab_size"),
        ({"use_rope": 1}, "use_rope"),
        ({"hidden_act": "none"}, "hidden_act"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"format_version": 99}, "format 99"),
    ],
    ids=str,
)
def test_impossible_values_are_named(change, name):
    with pytest.raises(ValueError, match=name):
        Eagle4Config(**{**SIZES, **change})


def test_a_full_draft_vocabulary_is_no_reduction():
    assert Eagle4Config(**SIZES, draft_vocab_size=100).draft_vocab_size is None


def test_the_pre_attention_norm_belongs_to_the_projection():
    assert not Eagle4Config(**SIZES, eh_proj=False, attn_norm=True).attn_norm


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 3]), (6, [0, 2, 5]), (7, [1, 2, 3])]
    + [(8, [1, 3, 4]), (30, [1, 14, 26]), (36, [1, 17, 32]), (61, [1, 29, 57])],
)
def test_default_taps(num_layers, expected):
    assert default_tap_layers(num_layers) == expected
    assert Eagle4Config(num_target_layers=num_layers).tap_layers == expected


def test_default_taps_are_always_distinct_ascending_and_inside():
    for num_layers in range(1, 130):
        taps = default_tap_layers(num_layers)
        assert taps == sorted(set(taps)) and 0 <= taps[0] and taps[-1] < num_layers
        assert len(taps) == min(3, num_layers)
    with pytest.raises(ValueError, match="num_target_layers"):
        default_tap_layers(0)


# -- for_target ----------------------------------------------------------------------------------

TARGETS = {
    "llama": LlamaConfig(
        hidden_size=96, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=10
    ),
    "qwen3": Qwen3Config(
        hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=40, vocab_size=77
    ),
    "qwen3_moe": Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
    "gemma3 text": Gemma3TextConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=8),
    "gemma3": Gemma3Config(text_config={"hidden_size": 64, "num_hidden_layers": 8}),
    "gpt2": GPT2Config(n_embd=48, n_head=4, n_layer=8, n_positions=123, vocab_size=70),
    "gpt_neox": GPTNeoXConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=8),
    "phi3": Phi3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_sizes_follow_the_target(kind):
    target = TARGETS[kind]
    text = target.get_text_config(decoder=True)
    config = Eagle4Config.for_target(target)
    assert config.hidden_size == config.target_hidden_size == text.hidden_size
    assert config.vocab_size == text.vocab_size
    assert config.num_target_layers == text.num_hidden_layers
    assert config.num_attention_heads == text.num_attention_heads
    assert config.max_position_embeddings == text.max_position_embeddings
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert Eagle4Config.from_dict(config.to_dict()) == config


def test_details_that_one_family_spells_differently():
    gpt2 = Eagle4Config.for_target(TARGETS["gpt2"])
    assert (gpt2.intermediate_size, gpt2.head_dim, gpt2.max_position_embeddings) == (192, 12, 123)
    qwen3 = Eagle4Config.for_target(TARGETS["qwen3"])
    assert (qwen3.head_dim, qwen3.num_key_value_heads) == (40, 2)
    assert qwen3.rms_norm_eps == TARGETS["qwen3"].rms_norm_eps
    gemma = Eagle4Config.for_target(TARGETS["gemma3 text"])
    assert gemma.rope_parameters["rope_theta"] == 1_000_000.0
    assert gemma.sliding_window == 4096


def test_overrides_win_and_the_target_keeps_its_width():
    config = Eagle4Config.for_target(TARGETS["llama"], hidden_size=32, candidate_rank=5)
    assert (config.hidden_size, config.target_hidden_size, config.candidate_rank) == (32, 96, 5)


# -- SpeculativeConfig ---------------------------------------------------------------------------


def test_speculative_values_are_parsed_or_named():
    assert SpeculativeConfig.parse(None) is None
    assert SpeculativeConfig.parse("eagle4") == SpeculativeConfig()
    given = SpeculativeConfig(mode="chain", max_depth=3)
    assert SpeculativeConfig.parse(given) is given and given.width == 1
    assert SpeculativeConfig.parse({"top_k": 2}).width == 2
    for wrong in ("eagle3", True, 4, ["eagle4"], {"depth": 3}, {"top_k": 0}, {"top_k": True}):
        with pytest.raises(ValueError):
            SpeculativeConfig.parse(wrong)
    for wrong in ({"mode": "graph"}, {"max_nodes": 64}, {"max_depth": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SpeculativeConfig(**wrong)
