"""Catches: a drafter that comes back from another project's layout with other bits or another
structure, files that are not complete, an EAGLE-4 drafter that is written as if it were EAGLE-3,
tap ids that are off by one between conventions."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_llama

from eagle4.config import Eagle4Config
from eagle4.drafter import Eagle4Drafter
from eagle4.drafter.export import export
from eagle4.drafter.speculators import from_speculators

EAGLE3 = {"eh_proj": False, "candidate_rank": 0, "num_candidates": 128, "sliding_window": None}
FORMS = {
    "eagle3": {**EAGLE3, "fc_norm": False, "norm_output": False},
    "eagle3.1": EAGLE3,
    "reduced": {**EAGLE3, "own_lm_head": True, "draft_vocab_size": 24},
    "windowed": {**EAGLE3, "sliding_window": 128, "own_embed_tokens": True, "own_lm_head": True},
}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(layers=9)


def made(target, form):
    torch.manual_seed(0)
    config = Eagle4Config.for_target(
        target.config, tokenizer_fingerprint="abc", **FORMS.get(form, {"candidate_rank": 4})
    )
    drafter = Eagle4Drafter(config)
    if config.draft_vocab_size:
        kept = torch.arange(24) * 3 + 1
        drafter.d2t.copy_(kept - torch.arange(24))
        drafter.t2d[kept] = True
    return drafter.bind(target.get_input_embeddings(), target.lm_head).eval()


def run(drafter, taps):
    state = drafter.fuse(taps)
    position = torch.tensor([3, 4, 5])
    out = drafter(state, position + 7, position, lambda q, k, v: q)
    return drafter.propose(out.head_RH, 5)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("form", FORMS)
def test_round_trips_are_bit_identical(tmp_path, target, form, layout):
    drafter = made(target, form)
    export(drafter, tmp_path, layout, verifier="some/target")
    loaded = Eagle4Drafter.from_pretrained(tmp_path)
    assert loaded.config.own_embed_tokens and loaded.config.own_lm_head, "complete"
    own = {"own_embed_tokens": True, "own_lm_head": True}
    for key in ("tap_layers", "fc_norm", "norm_output", "sliding_window", "draft_vocab_size"):
        assert getattr(loaded.config, key) == getattr(drafter.config, key), key
    assert loaded.config == Eagle4Config(**{**_keys(drafter.config), **own})
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    taps = torch.randn(3, 3, target.config.hidden_size)
    for a, b in zip(run(drafter, taps), run(loaded, taps), strict=True):
        assert torch.equal(a, b)


def _keys(config):
    from eagle4.config import structural_keys

    return {key: getattr(config, key) for key in structural_keys()}


def test_the_eagle3_file_is_what_other_loaders_expect(tmp_path, target):
    export(made(target, "eagle3.1"), tmp_path, "eagle3")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["fc_norm"] and config["norm_output"] and config["draft_vocab_size"] == 96
    assert not {"eh_proj", "candidate_rank", "own_lm_head"} & set(config)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"lm_head.weight", "embed_tokens.weight", "fc.weight", "norm.weight"} <= names
    assert "layers.0.self_attn.q_proj.weight" in names and "fc_norm.2.weight" in names


def test_the_candidate_head_stays_here(tmp_path, target):
    drafter = made(target, "eagle3.1")
    config = Eagle4Config(**{**_keys(drafter.config), "candidate_rank": 4})
    wide = Eagle4Drafter(config).bind(target.get_input_embeddings(), target.lm_head)
    export(wide, tmp_path, "eagle3")
    assert not [n for n in load_file(tmp_path / "model.safetensors") if "efficient" in n]


def test_speculators_counts_inputs_of_blocks(tmp_path, target):
    export(made(target, "eagle3"), tmp_path, "speculators", verifier="some/target")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["transformer_layer_config"]["hidden_size"] == 32
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dflash"}, "dflash"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"new_switch": 1}, "new_switch"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
    ],
)
def test_other_speculators_are_refused_by_name(tmp_path, target, change, message):
    export(made(target, "eagle3"), tmp_path, "speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        from_speculators({**config, **change})


def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, target):
    with pytest.raises(ValueError, match="it has eh_proj"):
        export(made(target, "eagle4"), tmp_path / "a", "eagle3")
    unbound = Eagle4Drafter(Eagle4Config.for_target(target.config, **EAGLE3))
    with pytest.raises(ValueError, match="borrows"):
        export(unbound, tmp_path / "a", "eagle3")
    with pytest.raises(ValueError, match="layout 'onnx'"):
        export(unbound, tmp_path / "a", "onnx")
    assert not (tmp_path / "a").exists()
    export(made(target, "eagle4"), tmp_path / "b", "eagle4")
    assert Eagle4Drafter.from_pretrained(tmp_path / "b").config.eh_proj
