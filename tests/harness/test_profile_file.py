"""Catches: costs of another machine that are believed, broken files that end a request,
half-written files, experience that is lost between processes.
"""

from __future__ import annotations

import json
import logging

import pytest

from eagle4.harness.acceptance import Experience
from eagle4.harness.fixed_point import ONE
from eagle4.harness.profile_file import ForeignProfile, file_name, read, read_or_none, write
from profiling.world import CPU

HERE = {"device": "this one", "dtype": "float32"}


def saved(path):
    experience = Experience()
    experience.observe(ONE // 2, 1, True)
    table = CPU.table(fingerprint=HERE, buckets=(4, 8))
    write(path, table, experience)
    return table, experience


def test_a_profile_comes_back_as_it_was(tmp_path):
    table, experience = saved(tmp_path / "deep" / "p.json")
    again, learned = read(tmp_path / "deep" / "p.json", HERE)
    assert again.to_dict() == table.to_dict() and learned.book() == experience.book()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["p.json"], "no temporary file stays"
    assert json.loads((tmp_path / "deep" / "p.json").read_text())["cost"]["unit"] == "ns"


def test_another_machine_is_refused_by_name(tmp_path):
    saved(tmp_path / "p.json")
    elsewhere = {**HERE, "device": "that one"}
    with pytest.raises(ForeignProfile, match="device: 'this one' there, 'that one' here"):
        read(tmp_path / "p.json", elsewhere)
    assert file_name(HERE) != file_name(elsewhere)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: text.replace('"unit": "ns"', '"unit": "ms"'),
        lambda text: text.replace('"rows": [', '"rows": [9999, ', 1),
        lambda text: text.replace('"trials": [', '"trials": [[], ', 1),
        lambda text: text.replace("27000000", "-1"),
    ],
)
def test_a_broken_file_is_measured_again_with_a_warning(tmp_path, caplog, damage):
    path = tmp_path / "p.json"
    saved(path)
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    with pytest.raises(ValueError, match="p.json"):
        read(path, HERE)
    with caplog.at_level(logging.WARNING, logger="eagle4"):
        assert read_or_none(path, HERE) is None
    assert "measured again" in caplog.text
    assert read_or_none(tmp_path / "absent.json", HERE) is None
