"""Catches: a profile that generation does not find, experience that a new measurement throws away,
a plot that needs matplotlib without saying so.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from scripted import small_drafter

import eagle4.cli.profile as command
from eagle4 import Eagle4ForCausalLM
from eagle4.cli import main
from eagle4.engine.home import fingerprint, profile_path
from eagle4.harness.profile_file import read, write
from tests.engine.compare import shared_target


@pytest.fixture
def model(monkeypatch):
    made = Eagle4ForCausalLM(shared_target(), small_drafter(shared_target()))
    monkeypatch.setattr(command, "load_pair", lambda args: SimpleNamespace(model=made))
    grid = command.COARSE._replace(repeats=1, verify_rows=(1, 4), contexts=(16, 64))
    monkeypatch.setattr(command, "COARSE", grid)
    return made


def test_what_is_measured_is_found_and_experience_is_kept(model, capsys):
    assert main(["profile", "--coarse"]) == 0
    out = capsys.readouterr().out
    assert "## verify" in out and "context 64, ms" in out
    record = json.loads(out.splitlines()[-1])
    here = fingerprint(model.adapter, model.drafter)
    path = profile_path(here)
    table, experience = read(path, here)
    assert record["file"] == str(path) and record["cost"]["level"]["rows"]
    assert table.surfaces["verify"].contexts == [16, 64]
    experience.rounds = 77
    write(path, table, experience)
    assert main(["profile", "--coarse"]) == 0
    assert read(path, here)[1].rounds == 77


def test_plot_names_what_it_needs(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = ["profile", "--coarse", "--out", str(tmp_path / "t.json"), "--plot", str(tmp_path / "p")]
    assert main(line) == 2
    assert "pip install" in capsys.readouterr().err


def test_plot_draws(model, tmp_path):
    pytest.importorskip("matplotlib")
    line = ["profile", "--coarse", "--out", str(tmp_path / "t.json")]
    assert main([*line, "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").stat().st_size > 1000
