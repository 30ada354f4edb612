"""Catches: a key read in another project's sense, taps off by one layer, a guessed depth."""

from __future__ import annotations

import logging

import pytest
from transformers import Gemma3Config, LlamaConfig

from eagle4.drafter.dialects import read_config
from tests.drafter.drafter_files import (
    LAYERS,
    eagle3_config,
    tensors_for,
)

IDS = "eagle_aux_hidden_state_layer_ids"


def read(config, tensors=None, **arguments):
    return read_config(config, tensors_for(config) if tensors is None else tensors, **arguments)


def test_depth_comes_from_the_file_or_from_the_target():
    config = eagle3_config()
    target = LlamaConfig(num_hidden_layers=LAYERS)
    without = {k: v for k, v in config.items() if k != "num_target_layers"}
    assert read(without, target_config=target) == read(config) == read(config, target_config=target)
    multimodal = Gemma3Config(text_config={"num_hidden_layers": LAYERS})
    assert read(without, target_config=multimodal).num_target_layers == LAYERS
    with pytest.raises(ValueError, match="target_config"):
        read(without)
    with pytest.raises(ValueError, match="num_target_layers is 9.*12"):
        read(config, target_config=LlamaConfig(num_hidden_layers=12))
    for wrong in ("9", 0, 1.5):
        with pytest.raises(ValueError, match="num_target_layers"):
            read(eagle3_config(num_target_layers=wrong))


@pytest.mark.parametrize("num_layers", [7, 9, 32, 36, 61, 93])
def test_files_without_ids_follow_the_official_rule(num_layers):
    official = eagle3_config(architectures=["LlamaForCausalLM"], num_target_layers=num_layers)
    inputs = [2, num_layers // 2, num_layers - 3]
    assert read(official).tap_layers == [block - 1 for block in inputs]


def test_the_rule_needs_seven_layers():
    with pytest.raises(ValueError, match="at least 7"):
        read(eagle3_config(num_target_layers=6))


def test_ids_are_outputs_of_blocks_unless_the_convention_says_inputs():
    config = eagle3_config(eagle_config={IDS: [2, 4, 6]})
    assert read(config).tap_layers == [2, 4, 6]
    assert read(config, tap_convention="post_block").tap_layers == [2, 4, 6]
    assert read(config, tap_convention="hidden_states").tap_layers == [1, 3, 5]
    marked = {**config, "tap_convention": "hidden_states"}
    assert read(marked).tap_layers == read(marked, tap_convention="hidden_states").tap_layers
    assert read(marked).tap_layers == [1, 3, 5]
    with pytest.raises(ValueError, match="contradicts the file"):
        read(marked, tap_convention="post_block")
    for wrong in ("pre_block", 1):
        with pytest.raises(ValueError, match="tap_convention must be one of"):
            read(config, tap_convention=wrong)


def test_ids_that_look_like_the_other_convention_are_reported(caplog):
    with caplog.at_level(logging.WARNING):
        read(eagle3_config(eagle_config={IDS: [1, 3, 5]}))
        assert not caplog.records
        read(eagle3_config(eagle_config={IDS: [2, 4, 6]}))
    assert "tap_convention" in caplog.text


@pytest.mark.parametrize(
    ("ids", "convention"),
    [
        ([0, 3, 8], "hidden_states"),
        ([1, 3, 9], "post_block"),
        ([1, 3, 10], "hidden_states"),
        ([-1, 3, 5], "post_block"),
        ([1, 1, 5], "post_block"),
        ([], "post_block"),
        ("1,3,5", "post_block"),
        ([1.0, 3, 5], "post_block"),
        ([True, 3, 5], "post_block"),
    ],
)
def test_impossible_ids_are_refused(ids, convention):
    with pytest.raises(ValueError):
        read(eagle3_config(eagle_config={IDS: ids}), tap_convention=convention)


def test_ids_are_read_from_both_places_and_counted():
    outer = eagle3_config(**{IDS: [0, 1, 2]})
    assert read(outer).tap_layers == [0, 1, 2]
    assert read({**outer, "eagle_config": {IDS: [0, 1, 2]}}).tap_layers == [0, 1, 2]
    with pytest.raises(ValueError, match="differently"):
        read({**outer, "eagle_config": {IDS: [0, 1, 3]}})
    with pytest.raises(ValueError, match="num_aux_hidden_states"):
        read({**outer, "num_aux_hidden_states": 2})
    assert read({**outer, "num_aux_hidden_states": 3}).tap_layers == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "means", "expected"),
    [
        (None, None, False),
        (False, None, False),
        (True, None, True),
        (True, "state", True),
        (False, "state", False),
        (None, "head", False),
        (True, "head", False),
    ],
)
def test_norm_output_has_two_meanings(value, means, expected):
    config = eagle3_config() if value is None else eagle3_config(norm_output=value)
    assert read(config, norm_output_means=means).norm_output is expected
    if means is not None:
        assert read({**config, "norm_output_means": means}).norm_output is expected


def test_norm_output_without_a_meaning_is_reported(caplog):
    with caplog.at_level(logging.WARNING):
        read(eagle3_config(norm_output=True), norm_output_means="state")
        assert not caplog.records
        read(eagle3_config(norm_output=True))
    assert "SpecForge" in caplog.text


def test_a_head_on_raw_outputs_is_refused():
    with pytest.raises(ValueError, match="raw outputs"):
        read(eagle3_config(norm_output=False), norm_output_means="head")
    with pytest.raises(ValueError, match="contradicts the file"):
        read(eagle3_config(norm_output_means="state"), norm_output_means="head")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 64, "use_sliding_window": True}, 64),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": None, "use_sliding_window": False}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"]}, 64),
    ],
    ids=str,
)
def test_sliding_window_and_its_switches(keys, expected):
    assert read(eagle3_config(**keys)).sliding_window == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True},
        {"layer_types": ["sliding_attention"]},
        {"sliding_window": 0},
        {"sliding_window": "64"},
        {"layer_types": ["full_attention"] * 2},
        {"layer_types": "full_attention"},
    ],
    ids=str,
)
def test_contradictory_windows_are_refused(keys):
    with pytest.raises(ValueError):
        read(eagle3_config(**keys))
