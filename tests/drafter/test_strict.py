"""Catches: a weight that stays random because its tensor is missing or misnamed, a tensor that
nobody reads, non-finite weights, a map that sends drafts to wrong tokens.
"""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle4.drafter.checkpoint import load, save
from tests.drafter.drafter_files import (
    ALL_FILES,
    DIALECTS,
    HIDDEN,
    REDUCED,
    VOCAB,
    eagle3_config,
    in_dialect,
    small_drafter,
    tensors_for,
    write_folder,
)


def names_of(kind, dialect):
    config, arguments, _ = ALL_FILES[kind]
    return sorted(in_dialect(tensors_for(config, **arguments), dialect))


CASES = [
    *[
        ("eagle3.1", dialect, name)
        for dialect in DIALECTS
        for name in names_of("eagle3.1", dialect)
    ],
    *[("wider target", "midlayer", name) for name in names_of("wider target", "midlayer")],
    *[("biases", "layers", n) for n in names_of("biases", "layers") if n.endswith("bias")],
]


@pytest.mark.parametrize(("kind", "dialect", "name"), CASES)
@pytest.mark.parametrize("damage", ["drop", "misname", "reshape", "retype"])
def test_every_damaged_tensor_is_named(tmp_path, kind, dialect, name, damage):
    config, arguments, _ = ALL_FILES[kind]
    tensors = in_dialect(tensors_for(config, **arguments), dialect)
    value = tensors.pop(name)
    if damage == "misname":
        tensors[name + "s"] = value
    elif damage == "reshape":
        tensors[name] = value[..., :-1]
    elif damage == "retype":
        tensors[name] = value.to(torch.int32)
    write_folder(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}\b"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["drop", "misname", "reshape"])
@pytest.mark.parametrize("own", [False, True])
def test_every_damaged_tensor_of_an_own_file_is_named(tmp_path, own, damage):
    small_drafter(own_embed_tokens=own, own_lm_head=own).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for name in whole:
        damaged = dict(whole)
        value = damaged.pop(name)
        if damage != "drop":
            damaged |= (
                {"x" + name: value} if damage == "misname" else {name: value[..., 1:].clone()}
            )
        save_file(damaged, file)
        with pytest.raises(ValueError, match=re.escape(name)):
            load(tmp_path)


@pytest.mark.parametrize(
    "name", ["mask_hidden", "fc.bias", "layers.1.mlp.up_proj.weight", "lm_head.down.weight"]
)
def test_every_additional_tensor_is_named(tmp_path, name):
    config = eagle3_config()
    write_folder(tmp_path, config, {**tensors_for(config), name: torch.zeros(2)})
    with pytest.raises(ValueError, match=f"unknown.*{re.escape(name)}"):
        load(tmp_path)


def test_everything_wrong_is_reported_at_once(tmp_path):
    config = eagle3_config()
    tensors = {**tensors_for(config), "extra": torch.zeros(1), "fc.weight": torch.zeros(3, 3)}
    del tensors["norm.weight"], tensors["d2t"]
    with pytest.raises(ValueError) as error:
        load(write_folder(tmp_path, config, tensors))
    for part in ("extra", "norm.weight", "d2t", "fc.weight", "[3, 3]", f"[{HIDDEN}, {3 * HIDDEN}]"):
        assert part in str(error.value)


def test_mixed_dialects_are_refused(tmp_path):
    config = eagle3_config()
    tensors = tensors_for(config)
    tensors["midlayer.hidden_norm.weight"] = tensors.pop("layers.0.hidden_norm.weight")
    with pytest.raises(ValueError, match="mix.*midlayer.hidden_norm.weight"):
        load(write_folder(tmp_path, config, tensors))


def test_only_what_the_target_can_lend_may_be_absent(tmp_path):
    reduced = eagle3_config()
    with pytest.raises(ValueError, match="missing.*lm_head.weight"):
        load(write_folder(tmp_path / "a", reduced, tensors_for(reduced, head=False)))
    wide = eagle3_config(target_hidden_size=48)
    with pytest.raises(ValueError, match="missing.*embed_tokens.weight"):
        load(write_folder(tmp_path / "b", wide, tensors_for(wide)))
    tied = eagle3_config(draft_vocab_size=VOCAB, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="missing.*lm_head.weight"):
        load(write_folder(tmp_path / "c", tied, tensors_for(tied, head=False, embed=True)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_named(tmp_path, value):
    config = eagle3_config()
    whole = tensors_for(config)
    for name in ("fc.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight"):
        tensors = {key: tensor.clone() for key, tensor in whole.items()}
        tensors[name].view(-1)[3] = value
        with pytest.raises(ValueError, match=f"non-finite.*{name}"):
            load(write_folder(tmp_path, config, tensors))


def test_a_cast_that_overflows_is_non_finite(tmp_path):
    config = eagle3_config()
    tensors = tensors_for(config)
    tensors["fc.weight"][0, 0] = 1e6
    write_folder(tmp_path, config, tensors)
    assert load(tmp_path).fc.weight[0, 0] == 1e6
    with pytest.raises(ValueError, match="non-finite.*fc.weight"):
        load(tmp_path, dtype=torch.float16)
    with pytest.raises(ValueError, match="non-finite.*fc.weight"):
        save(load(tmp_path), tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def damage_map(tensors, damage):
    d2t, t2d = tensors["d2t"].clone(), tensors["t2d"].clone()
    ids = d2t + torch.arange(REDUCED)
    if damage == "beyond":
        d2t[4] = VOCAB - 4
    elif damage == "negative":
        d2t[4] = -5
    elif damage == "target ids instead of offsets":
        d2t = ids
    elif damage == "twice":
        d2t[4] = ids[7] - 4
    elif damage == "identity":
        d2t = torch.zeros_like(d2t)
    elif damage == "mask":
        t2d[ids[0]] = False
    elif damage == "short":
        d2t = d2t[:-1]
    elif damage == "long mask":
        t2d = torch.cat([t2d, t2d[:1]])
    elif damage == "huge":
        d2t[4] = 2**63 - 1
    return {**tensors, "d2t": d2t, "t2d": t2d}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("beyond", r"d2t.*\[4\]"),
        ("negative", r"d2t.*\[4\]"),
        ("target ids instead of offsets", "d2t"),
        ("twice", "d2t.*more than once"),
        ("identity", "d2t and t2d"),
        ("mask", "d2t and t2d"),
        ("short", "d2t has shape"),
        ("long mask", "t2d has shape"),
        ("huge", r"d2t.*\[4\]"),
    ],
)
def test_every_damaged_map_is_refused(tmp_path, damage, message):
    config = eagle3_config()
    with pytest.raises(ValueError, match=message):
        load(write_folder(tmp_path, config, damage_map(tensors_for(config), damage)))


def test_a_map_of_another_size_is_refused_and_never_saved(tmp_path):
    config = eagle3_config(draft_vocab_size=REDUCED + 8)
    with pytest.raises(ValueError, match="d2t has shape"):
        load(write_folder(tmp_path, config, tensors_for(eagle3_config())))
    fresh = small_drafter(candidate_rank=0, draft_vocab_size=10, own_lm_head=True)
    with pytest.raises(ValueError, match="t2d"):
        fresh.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
