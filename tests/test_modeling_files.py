"""Catches: a saved pair that comes back with other bits, untied weights, another generation config
or without its drafter; loading by Auto class, by two folders, by one; dtypes that part the pair
(I4).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scripted import small_drafter
from tiny import tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import eagle4.pair
from eagle4 import Eagle4ForCausalLM, SpeculativeConfig
from tests.engine.compare import VOCAB, assert_identical, eagle, plain, prompt

NEW = 8
INPUTS = prompt([6, 2])


def build(tied: bool = False, **overrides) -> Eagle4ForCausalLM:
    target = tiny_llama(vocab=VOCAB, layers=2, tie_word_embeddings=tied)
    target.generation_config.eos_token_id = [21, 22]
    return Eagle4ForCausalLM(target, small_drafter(target, **overrides))


def assert_same_pair(a: Eagle4ForCausalLM, b: Eagle4ForCausalLM) -> None:
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]), (
            name
        )
    runs = []
    for model in (a, b):
        out = eagle(model, INPUTS, max_new_tokens=NEW)
        stats = model.last_speculation
        assert not stats.fallbacks
        runs.append((out.tolist(), stats.accepted_per_round, stats.nodes_drafted))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("loader", [Eagle4ForCausalLM, AutoModelForCausalLM])
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_of_a_pair_folder(tmp_path, tied, loader):
    model = build(tied)
    model.save_pretrained(tmp_path)
    loaded = loader.from_pretrained(tmp_path)
    assert isinstance(loaded, Eagle4ForCausalLM) and not loaded.training
    assert_same_pair(model, loaded)
    head, embed = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    assert (head.weight is embed.weight) == tied
    assert_identical(loaded, INPUTS, max_new_tokens=NEW)
    # The drafter borrows from the loaded target, not from a copy.
    assert loaded.drafter.embedding is embed and loaded.drafter.head is head


@pytest.mark.parametrize(
    "overrides",
    [
        {"own_lm_head": True, "own_embed_tokens": True},
        {"candidate_rank": 0, "eh_proj": False},
        {"use_rope": False, "norm_output": False, "fc_norm": False, "sliding_window": 7},
        {"candidate_rank": 0, "own_lm_head": True, "draft_vocab_size": 16},
    ],
    ids=str,
)
def test_round_trip_of_other_structures(tmp_path, overrides):
    model = build(**overrides)
    if "draft_vocab_size" in overrides:
        model.drafter.t2d[4:20] = True
        model.drafter.d2t.fill_(4)
    model.save_pretrained(tmp_path)
    loaded = Eagle4ForCausalLM.from_pretrained(tmp_path)
    assert_same_pair(model, loaded)
    assert loaded.drafter.config == model.drafter.config


def test_generation_config_survives(tmp_path):
    model = build()
    model.generation_config.speculative = "eagle4"
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path)
    for loader in (Eagle4ForCausalLM, AutoModelForCausalLM):
        loaded = loader.from_pretrained(tmp_path)
        assert loaded.generation_config.speculative == "eagle4"
        assert loaded.generation_config.eos_token_id == [21, 22]
        out = loaded.generate(**INPUTS, do_sample=False)
        stats = loaded.last_speculation
        assert stats.rounds > stats.plain_rounds, "speculation was on"
        # The target alone has the same defaults, so it stays a fair baseline.
        assert out.tolist() == loaded.target.generate(**INPUTS, do_sample=False).tolist()


@pytest.mark.parametrize("value", [{"top_k": 2, "mode": "tree"}, SpeculativeConfig(max_depth=3)])
def test_settings_in_the_generation_config_survive(tmp_path, value):
    model = build()
    model.generation_config.speculative = value
    model.save_pretrained(tmp_path)
    loaded = Eagle4ForCausalLM.from_pretrained(tmp_path)
    got = SpeculativeConfig.parse(loaded.generation_config.speculative)
    assert got == SpeculativeConfig.parse(value)


def test_two_folders(tmp_path):
    model = build()
    model.target.save_pretrained(tmp_path / "target")
    model.drafter.save_pretrained(tmp_path / "drafter")
    loaded = Eagle4ForCausalLM.from_pretrained(tmp_path / "target", tmp_path / "drafter")
    assert_same_pair(model, loaded)
    loaded = Eagle4ForCausalLM.from_pretrained(str(tmp_path / "target"), model.drafter)
    assert_same_pair(model, loaded)
    loaded = Eagle4ForCausalLM.from_pretrained(model.target, tmp_path / "drafter")
    assert_same_pair(model, loaded)
    assert loaded.target is model.target


def test_without_a_drafter(tmp_path):
    target = tiny_llama(vocab=VOCAB, layers=2)
    target.save_pretrained(tmp_path / "target")
    loaded = Eagle4ForCausalLM.from_pretrained(tmp_path / "target")
    assert loaded.drafter is None
    assert_identical(loaded, INPUTS, max_new_tokens=NEW)
    loaded.save_pretrained(tmp_path / "pair")
    again = Eagle4ForCausalLM.from_pretrained(tmp_path / "pair")
    assert again.drafter is None
    assert_identical(again, INPUTS, max_new_tokens=NEW)


def test_another_drafter_for_a_pair_folder(tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "pair")
    other = small_drafter(model.target, seed=9)
    other.save_pretrained(tmp_path / "drafter")
    loaded = Eagle4ForCausalLM.from_pretrained(tmp_path / "pair", tmp_path / "drafter")
    assert_same_pair(loaded, Eagle4ForCausalLM(model.target, other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float16])
def test_dtype_applies_to_both(tmp_path, dtype):
    model = build()
    model.save_pretrained(tmp_path / "pair")
    model.target.save_pretrained(tmp_path / "target")
    model.drafter.save_pretrained(tmp_path / "drafter")
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for paths in ((tmp_path / "pair",), (tmp_path / "target", tmp_path / "drafter")):
        loaded = Eagle4ForCausalLM.from_pretrained(*paths, dtype=dtype)
        assert {p.dtype for p in loaded.parameters()} == {wanted}
        out = eagle(loaded, INPUTS, max_new_tokens=NEW)
        stats = loaded.last_speculation
        assert out.shape[1] <= 6 + NEW and not stats.fallbacks and stats.rounds > stats.plain_rounds


def test_a_bfloat16_pair_is_saved_and_loaded_as_it_is(tmp_path):
    model = build().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = Eagle4ForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert_same_pair(model, loaded)


def test_sharded_files(tmp_path):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_pair(model, Eagle4ForCausalLM.from_pretrained(tmp_path))


def test_saving_after_generating(tmp_path):
    model = build()
    eagle(model, INPUTS, max_new_tokens=3)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "eagle4_pair"
    assert "eagle4" not in json.dumps(config.get("_attn_implementation", ""))
    assert_same_pair(model, Eagle4ForCausalLM.from_pretrained(tmp_path))


def test_the_pair_config_round_trips(tmp_path):
    model = build()
    model.config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, eagle4.pair.Eagle4PairConfig)
    assert config.text_config.to_dict() == model.config.text_config.to_dict()
    assert config.drafter_config == model.drafter.config


def test_the_users_target_folder_stays_loadable_by_itself(tmp_path):
    """Saving the target of a pair writes what Transformers alone would write."""
    model = build()
    eagle(model, INPUTS, max_new_tokens=3)
    model.target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    got = loaded.generate(**INPUTS, do_sample=False, max_new_tokens=NEW)
    assert got.tolist() == plain(model, INPUTS, max_new_tokens=NEW).tolist()


def test_a_missing_tensor_of_the_pair_is_an_error(tmp_path):
    """Never a randomly initialised drafter behind a healthy-looking load (I1)."""
    from safetensors.torch import load_file, save_file

    build().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if name.startswith("drafter.")]
    assert names
    for name in (names[0], "target.model.layers.1.mlp.up_proj.weight"):
        save_file({k: v for k, v in tensors.items() if k != name}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=name.split(".")[-2]):
            Eagle4ForCausalLM.from_pretrained(tmp_path)


def test_folders_that_hold_no_model(tmp_path):
    for path in (tmp_path, Path(tmp_path / "nowhere")):
        with pytest.raises((OSError, ValueError)):
            Eagle4ForCausalLM.from_pretrained(path)


def test_a_generation_config_folder_keeps_speculative(tmp_path):
    config = GenerationConfig(speculative={"top_k": 3}, max_new_tokens=4)
    config.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).speculative == {"top_k": 3}
