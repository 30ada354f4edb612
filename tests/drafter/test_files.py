"""Catches: half-written or truncated files, pickles that are opened, paths that leave the folder,
errors that do not name the file.
"""

from __future__ import annotations

import json
import os
import re
import stat

import pytest
from safetensors.torch import save_file

from eagle4.drafter import files
from eagle4.drafter.checkpoint import load, save
from tests.drafter.drafter_files import (
    eagle3_config,
    small_drafter,
    tensors_for,
    write_folder,
)
from tests.drafter.reference import assert_follows_reference


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
