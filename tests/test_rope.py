"""Catches: a RoPE setting that is lost or replaced by a default in one of the two schemas, a type
or key that nobody reads, a drafter that rotates differently after being saved.
"""

from __future__ import annotations

import logging

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle4.config import Eagle4Config
from eagle4.drafter import Eagle4Drafter
from eagle4.rope import LLAMA_THETA, normalize_rope, read_rope, rope_for_target, write_rope

SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn tuned": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "yarn without its origin": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.5, 3.0, 3.5],
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "mrope": {"type": "mrope", "mrope_section": [1, 1, 2]},
}
SIZES = dict(
    hidden_size=32,
    num_attention_heads=4,
    intermediate_size=40,
    vocab_size=50,
    max_position_embeddings=256,
    candidate_rank=4,
)


def frequencies(raw):
    config = Eagle4Config(**SIZES, rope_parameters=read_rope(raw, 256))
    rotary = Eagle4Drafter(config)._rotary
    return rotary.inv_freq, rotary.attention_scaling, config.rope_parameters


@pytest.mark.parametrize("kind", SCALINGS)
def test_both_schemas_give_the_frequencies_of_transformers(kind):
    scaling = SCALINGS[kind]
    old = {"rope_theta": 12345.0, "rope_scaling": scaling}
    new = {"rope_parameters": {"rope_theta": 12345.0, **(scaling or {"rope_type": "default"})}}
    beside = {"rope_theta": 12345.0, "rope_parameters": scaling or {"rope_type": "default"}}
    found = [frequencies(raw) for raw in (old, new, beside, {**old, **new})]
    for inverse, factor, parameters in found:
        assert inverse.equal(found[0][0]) and factor == found[0][1]
        assert parameters == found[0][2]
    if kind != "mrope":
        sizes = {k: v for k, v in SIZES.items() if k != "candidate_rank"}
        llama = LlamaRotaryEmbedding(LlamaConfig(**sizes, head_dim=8, **new))
        assert llama.inv_freq.equal(found[0][0]) and llama.attention_scaling == found[0][1]


@pytest.mark.parametrize("kind", SCALINGS)
def test_what_is_written_reads_back_from_each_schema_alone(kind):
    whole = read_rope({"rope_theta": 777.0, "rope_scaling": SCALINGS[kind]}, 256)
    written = write_rope(whole)
    old = {key: written[key] for key in ("rope_theta", "rope_scaling")}
    new = {"rope_parameters": written["rope_parameters"]}
    assert read_rope(written, 256) == read_rope(old, 256) == read_rope(new, 256) == whole


def test_a_drafter_keeps_its_frequencies_on_disk(tmp_path):
    for kind, scaling in SCALINGS.items():
        raw = {"rope_theta": 333.0, "rope_scaling": scaling}
        drafter = Eagle4Drafter(Eagle4Config(**SIZES, rope_parameters=read_rope(raw, 256)))
        drafter.save_pretrained(tmp_path / kind)
        again = Eagle4Drafter.from_pretrained(tmp_path / kind)
        assert again._rotary.inv_freq.equal(drafter._rotary.inv_freq)
        assert again._rotary.attention_scaling == drafter._rotary.attention_scaling


def test_llamas_own_base_is_used_only_aloud(caplog):
    with caplog.at_level(logging.WARNING):
        assert read_rope({"rope_theta": 5.0}, 9)["rope_theta"] == 5.0
        assert not caplog.records
        assert read_rope({}, 9)["rope_theta"] == LLAMA_THETA
    assert "rope_theta" in caplog.text


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
        {
            "rope_theta": 5.0,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 3.0},
        },
        {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0, "extra_knob": 1}},
        {"rope_theta": 5.0, "rope_scaling": {"type": "linear"}},
        {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": "2"}},
        {"rope_theta": 5.0, "rope_scaling": {"type": "llama3", "factor": 2.0}},
        {"rope_theta": 5.0, "rope_scaling": {"type": "spiral", "factor": 2.0}},
        {"rope_theta": 5.0, "rope_scaling": {"type": ["linear"], "factor": 2.0}},
        {"rope_theta": 5.0, "rope_scaling": "linear"},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}},
        *[{"rope_theta": theta} for theta in (0, -1.0, "10000", float("nan"), float("inf"), True)],
    ],
    ids=str,
)
def test_contradictions_unknown_keys_and_junk_are_refused(raw):
    with pytest.raises(ValueError):
        read_rope(raw, 256)


def test_errors_name_the_key():
    with pytest.raises(ValueError, match="extra_knob"):
        normalize_rope({"rope_theta": 1.0, "extra_knob": 2}, 9)
    with pytest.raises(ValueError, match="high_freq_factor.*low_freq_factor"):
        normalize_rope({"rope_theta": 1.0, "rope_type": "llama3", "factor": 2.0}, 9)
    with pytest.raises(ValueError, match="rope_theta"):
        normalize_rope({"rope_type": "default"}, 9)


def test_settings_are_copied_not_shared():
    given = {"type": "linear", "factor": 2.0, "rope_theta": 5.0}
    before = dict(given)
    Eagle4Config(**SIZES, rope_parameters=given)
    assert given == before


def test_a_target_passes_on_what_a_llama_layer_can_compute():
    scaled = LlamaConfig(rope_parameters={**SCALINGS["llama3"], "rope_theta": 5e5})
    assert rope_for_target(scaled) == scaled.rope_parameters
    gemma = Gemma3TextConfig()
    assert rope_for_target(gemma) == gemma.rope_parameters["full_attention"]
    partial = Phi3Config(partial_rotary_factor=0.5)
    assert rope_for_target(partial) == {"rope_theta": partial.rope_parameters["rope_theta"]}
