"""Catches: a drafter that computes something else than its file says, bits lost between save and
load, a precision that changes unasked, weights that are views of a file.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from eagle4.drafter import Eagle4Drafter
from eagle4.drafter.checkpoint import load, save
from tests.drafter.drafter_files import (
    ALL_FILES,
    DIALECTS,
    EAGLE3_FILES,
    EAGLE4_FILES,
    HIDDEN,
    REDUCED,
    eagle3_config,
    in_dialect,
    small_drafter,
    tensors_for,
    write_folder,
)
from tests.drafter.reference import Lender, assert_follows_reference


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", EAGLE3_FILES)
def test_eagle3_files_compute_what_the_paper_says(tmp_path, kind, dialect):
    config, arguments, norm_output = EAGLE3_FILES[kind]
    tensors = tensors_for(config, **arguments)
    drafter = load(write_folder(tmp_path, config, in_dialect(tensors, dialect)))
    assert not drafter.training
    assert_follows_reference(drafter, config, tensors, norm_output)


@pytest.mark.parametrize("kind", EAGLE4_FILES)
def test_eagle4_files_compute_what_the_article_says(tmp_path, kind):
    config, arguments, norm_output = EAGLE4_FILES[kind]
    tensors = tensors_for(config, **arguments)
    drafter = load(write_folder(tmp_path, config, tensors))
    assert drafter.config.candidate_rank == arguments.get("rank", 0)
    assert_follows_reference(drafter, config, tensors, norm_output)


def test_draft_ids_become_target_ids_by_offset(tmp_path):
    config = eagle3_config()
    tensors = tensors_for(config)
    drafter = load(write_folder(tmp_path, config, tensors))
    head = Lender().run(drafter)[0].head_RH
    with torch.no_grad():
        found = drafter.propose(head, REDUCED)
    logp, draft_id = (head @ tensors["lm_head.weight"].T).log_softmax(-1).sort(descending=True)
    kept = tensors["t2d"].nonzero().flatten().tolist()
    assert found.token_RK.equal(draft_id + tensors["d2t"][draft_id])
    assert sorted(found.token_RK[0].tolist()) == kept
    torch.testing.assert_close(found.logp_RK, logp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dialect"),
    [(kind, dialect) for kind in EAGLE3_FILES for dialect in DIALECTS]
    + [(kind, "layers") for kind in ALL_FILES if kind not in EAGLE3_FILES],
)
def test_round_trip_keeps_every_bit(tmp_path, kind, dialect):
    config, arguments, _ = ALL_FILES[kind]
    tensors = in_dialect(tensors_for(config, **arguments), dialect)
    first = load(write_folder(tmp_path / "foreign", config, tensors))
    first.save_pretrained(tmp_path / "own")
    second = Eagle4Drafter.from_pretrained(tmp_path / "own")
    assert second.config == first.config and not second.training
    assert list(first.state_dict()) == list(second.state_dict())
    for name, value in first.state_dict().items():
        assert value.dtype == second.state_dict()[name].dtype and value.equal(
            second.state_dict()[name]
        )
    lender = Lender(config.get("target_hidden_size", HIDDEN), len(first.config.tap_layers))
    for before, after in zip(lender.run(first), lender.run(second), strict=True):
        assert before.state_RH.equal(after.state_RH)
        for x, y in zip(
            first.propose(before.head_RH, 5), second.propose(after.head_RH, 5), strict=True
        ):
            assert x.equal(y)


def test_save_casts_on_request_and_names_the_dtype(tmp_path):
    drafter = small_drafter()
    save(drafter, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert drafter.fc.weight.dtype == torch.float32
    assert load(tmp_path).fc.weight.dtype == torch.bfloat16
    assert load(tmp_path, dtype="float32").fc.weight.dtype == torch.float32
    assert load(tmp_path, dtype="auto").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="int8"):
        load(tmp_path, dtype=torch.int8)


def test_mixed_files_load_in_their_widest_dtype(tmp_path):
    config = eagle3_config()
    tensors = {
        name: value.bfloat16() if "mlp" in name else value
        for name, value in tensors_for(config).items()
    }
    drafter = load(write_folder(tmp_path, config, tensors))
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}


def test_own_file_says_everything_that_others_must_know(tmp_path):
    small_drafter(tap_layers=[0, 3, 8], tokenizer_fingerprint="abc").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle4"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tap_convention": "post_block",
        "tokenizer_fingerprint": "abc",
        "num_target_layers": 9,
        "format_version": 1,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "norm_output": True,
        "own_lm_head": False,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 8]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_loading_under_a_meta_device_still_gives_real_weights(tmp_path):
    config = eagle3_config()
    tensors = tensors_for(config)
    with torch.device("meta"):
        drafter = load(write_folder(tmp_path, config, tensors))
    assert_follows_reference(drafter, config, tensors, False)


def test_loaded_weights_do_not_follow_the_file(tmp_path):
    config = eagle3_config()
    drafter = load(write_folder(tmp_path, config, tensors_for(config)))
    before = drafter.fc.weight.clone()
    size = (tmp_path / "model.safetensors").stat().st_size
    with open(tmp_path / "model.safetensors", "rb+") as file:
        file.write(b"\0" * size)
    assert drafter.fc.weight.equal(before)


def test_impossible_sizes_are_refused_before_anything_is_allocated(tmp_path):
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "head_dim",
    ):
        for size in (2**30, 2**62, 10**30, 0, -1, "32", 1.5, True):
            config = eagle3_config(**{key: size})
            with pytest.raises(ValueError):
                load(write_folder(tmp_path, config, tensors_for(eagle3_config())))
