"""Catches: a drafter that computes something else than its file says, a weight that stays random,
a tensor that nobody reads, a map that sends drafts to wrong tokens, bits lost between save and
load, half-written files, pickles that are opened, files that are trusted blindly.
"""

from __future__ import annotations

import json
import os
import re
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle4.config import Eagle4Config
from eagle4.drafter import Eagle4Drafter, files
from eagle4.drafter.checkpoint import load, save
from tests.drafter.drafter_files import (
    DIALECTS,
    HIDDEN,
    REDUCED,
    VOCAB,
    Lender,
    eagle3_config,
    eagle4_config,
    in_dialect,
    reference_run,
    tensors_for,
    write_folder,
)

# name -> (config.json, arguments of tensors_for, normalised recurrence)
EAGLE3_FILES = {
    "official": (eagle3_config(architectures=["LlamaForCausalLM"]), {}, False),
    "eagle3": (eagle3_config(), {"embed": True}, False),
    "eagle3.1": (eagle3_config(fc_norm=True, norm_output=True), {}, True),
    "wider target": (eagle3_config(target_hidden_size=48), {"embed": True}, False),
    "full vocabulary": (eagle3_config(draft_vocab_size=VOCAB), {}, False),
    "borrowed head": (eagle3_config(draft_vocab_size=VOCAB), {"head": False}, False),
    "biases": (eagle3_config(attention_bias=True), {}, False),
    "two taps": (
        eagle3_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 5]}),
        {"taps": 2},
        False,
    ),
}
EAGLE4_FILES = {
    "2H-wide": (eagle4_config(fc_norm=True), {"rank": 6}, True),
    "eh_proj": (eagle4_config(fc_norm=True), {"rank": 6, "eh_proj": True, "embed": True}, True),
    "no candidate head": (eagle4_config(), {"eh_proj": True}, True),
    "borrowed head": (eagle4_config(), {"rank": 6, "head": False}, True),
}
ALL_FILES = {**EAGLE3_FILES, **{f"eagle4 {k}": v for k, v in EAGLE4_FILES.items()}}


def assert_follows_reference(drafter, config, tensors, norm_output):
    lender = Lender(config.get("target_hidden_size", HIDDEN), len(drafter.config.tap_layers))
    expected = reference_run(config, tensors, lender, norm_output)
    for found, (head, state) in zip(lender.run(drafter), expected, strict=True):
        torch.testing.assert_close(found.head_RH, head, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(found.state_RH, state, rtol=2e-4, atol=2e-4)


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


# -- round trip ----------------------------------------------------------------------------------


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


def small_drafter(**overrides):
    values = dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        vocab_size=50,
        num_target_layers=9,
        candidate_rank=4,
        num_candidates=8,
    )
    return Eagle4Drafter(Eagle4Config(**{**values, **overrides}))


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


# -- tensors that do not fit ---------------------------------------------------------------------


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


# -- the map of a reduced vocabulary -------------------------------------------------------------


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


# -- placement -----------------------------------------------------------------------------------


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


# -- files ---------------------------------------------------------------------------------------


def test_truncated_files_are_named(tmp_path):
    config = eagle3_config()
    file = write_folder(tmp_path, config, tensors_for(config)) / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, 1000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(str(file))):
            load(tmp_path)
    for junk in (b"\xff" * 200, b"\0" * 200, whole + b"1234"):
        file.write_bytes(junk)
        with pytest.raises(ValueError, match=re.escape(str(file))):
            load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "drafter.pt", "x.pth", "y.ckpt", "z.pkl"])
def test_pickles_are_refused_by_name_and_never_opened(tmp_path, name):
    config = eagle3_config()
    folder = write_folder(tmp_path, config, tensors_for(config))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(
        b"cos\nsystem\n(S'touch " + os.fsencode(folder / "owned") + b"'\ntR."
    )
    with pytest.raises(ValueError, match=f"{name}.*safetensors"):
        load(folder)
    assert not (folder / "owned").exists()


def test_a_pickle_next_to_safetensors_is_ignored(tmp_path):
    config = eagle3_config()
    folder = write_folder(tmp_path, config, tensors_for(config))
    (folder / "pytorch_model.bin").write_bytes(b"junk")
    load(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "\x00", "[" * 100_000])
def test_broken_configurations_are_named(tmp_path, text):
    config = eagle3_config()
    file = write_folder(tmp_path, config, tensors_for(config)) / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(file))):
        load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))} is missing"):
        load(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        load(tmp_path / "file")
    with pytest.raises(ValueError, match="is a file"):
        save(small_drafter(), tmp_path / "file")
    for path in (tmp_path / "nothing", "a/b/c", "", "../up", "~/x"):
        with pytest.raises(ValueError, match="neither a folder nor a hub id|hub does not give it"):
            load(path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(eagle3_config()))
    with pytest.raises(ValueError, match="no safetensors"):
        load(tmp_path / "empty")


def test_hub_ids_fetch_json_and_safetensors_only(tmp_path, monkeypatch):
    config = eagle3_config()
    write_folder(tmp_path, config, tensors_for(config))
    seen = {}

    def download(repo, **arguments):
        seen.update(repo=repo, **arguments)
        return str(tmp_path)

    monkeypatch.setattr(files, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    load("owner/drafter-8B", revision="abc")
    assert seen == {
        "repo": "owner/drafter-8B",
        "revision": "abc",
        "allow_patterns": ["*.json", "*.safetensors"],
    }

    def fail(repo, **arguments):
        raise OSError("offline")

    monkeypatch.setattr(files, "snapshot_download", fail)
    with pytest.raises(ValueError, match="owner/drafter.*offline"):
        load("owner/drafter")


def write_shards(folder, config, tensors):
    """Two shards and their index; returns the index."""
    write_folder(folder, config, tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def test_shards_load_and_their_index_is_checked(tmp_path):
    config = eagle3_config()
    tensors = tensors_for(config)
    places = write_shards(tmp_path, config, tensors)
    assert_follows_reference(load(tmp_path), config, tensors, False)
    index = tmp_path / "model.safetensors.index.json"
    wrong = [
        ({k: v for k, v in places.items() if k != "d2t"}, "d2t"),
        ({**places, "extra": "part-0.safetensors"}, "extra"),
        ({**places, "d2t": "part-9.safetensors"}, "part-9.safetensors is missing"),
        ({**places, "d2t": "../part-0.safetensors"}, "no file of its folder"),
        ({**places, "d2t": "/etc/passwd"}, "no file of its folder"),
        ({**places, "d2t": 3}, "weight_map"),
        (None, "weight_map"),
    ]
    for weight_map, message in wrong:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=re.escape(message)):
            load(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match="part-0.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("stage", ["weights", "config", "sync", "first move", "second move"])
def test_a_crash_while_saving_leaves_whole_files(tmp_path, monkeypatch, stage):
    old, new = small_drafter(), small_drafter()
    old.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("card")
    before = {name: (tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")}
    real, calls = os.replace, []

    def crash(*arguments, **keywords):
        raise OSError("disk full")

    def replace(source, target):
        calls.append(target)
        if len(calls) == (1 if stage == "first move" else 2):
            crash()
        real(source, target)

    if stage == "weights":
        monkeypatch.setattr(files, "save_file", crash)
    elif stage == "config":
        monkeypatch.setattr(files.json, "dumps", crash)
    elif stage == "sync":
        monkeypatch.setattr(files.os, "fsync", crash)
    else:
        monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(OSError, match="disk full"):
        save(new, tmp_path)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    if stage != "second move":
        assert before == {name: (tmp_path / name).read_bytes() for name in before}
    load(tmp_path)


def test_files_have_the_permissions_of_the_user(tmp_path):
    small_drafter().save_pretrained(tmp_path / "new" / "folder")
    (tmp_path / "other").write_text("x")
    usual = stat.S_IMODE((tmp_path / "other").stat().st_mode)
    for file in (tmp_path / "new" / "folder").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == usual
