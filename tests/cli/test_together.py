"""Catches: a command that starts on several ranks without sharing anything, ranks that all print,
an error that every rank reports or none, a target that training splits; files or a profile written
by several ranks, ranks that end with different statuses, an arm on which ranks could not agree."""

from __future__ import annotations

import json
import logging
import os
import socket
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
import transformers
import zoo
from scripted import small_drafter

from eagle4.cli import main, together
from eagle4.cli.common import load_target
from tests.parallel import commands
from tests.parallel.world import run_world


@pytest.fixture
def launched(monkeypatch):
    """As if a launcher had started this process as one of two."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    values = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    root, level = logging.getLogger(), logging.getLogger().level
    hf_level = transformers.logging.get_verbosity()
    yield monkeypatch
    root.setLevel(level)
    transformers.logging.set_verbosity(hf_level)


@pytest.mark.parametrize("command", ["chat", "convert --drafter x --out x"])
def test_commands_of_one_process_say_so(launched, capsys, command):
    launched.setattr(together, "is_first_to_fail", lambda: True)
    assert main(command.split()) == 2
    name = command.split()[0]
    assert f"`eagle4 {name}` runs in one process" in capsys.readouterr().err


def test_ranks_bench_check_and_profile_together(tmp_path):
    parts = pair(tmp_path)
    asked = [*parts, "--max-new-tokens", "6", "--limit", "2", "--no-harness"]
    (tmp_path / "prompts.txt").write_text("w1 w9\nw2 w3\n")
    asked += ["--prompts", str(tmp_path / "prompts.txt")]
    lines = [
        ["check", *asked, "--out", str(tmp_path / "check")],
        ["check", *asked, "--temperature", "1.0", "--seed", "3"],
        ["bench", *asked, "--warmup", "0", "--out", str(tmp_path / "bench")],
        ["bench", *asked, "--arms", "transformers,plain"],
        ["profile", *parts, "--coarse", "--out", str(tmp_path / "costs.json")],
    ]
    first, second = run_world(2, commands.run, *lines)
    assert [end["status"] for end in first] == [end["status"] for end in second] == [0, 0, 0, 2, 0]
    assert not any(end["out"] or end["err"] for end in second)
    last = [json.loads(end["out"].splitlines()[-1]) for end in first if end["status"] == 0]
    assert last[0]["ok"] and last[0]["pairs"] and last[0]["tokens"] > 6
    assert last[1]["ok"] and set(last[2]["arms"]) == {"plain", "eagle4"}
    assert "2, sums by gloo" in first[2]["out"]
    assert "no transformers arm" in first[3]["err"] and first[3]["err"].count("\n") == 1
    written = sorted(path.name for path in tmp_path.glob("*.*"))
    assert written == ["bench.json", "bench.md", "check.json", "check.md", "costs.json"] + [
        "prompts.txt"
    ]
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert costs["cost"]["fingerprint"]["tensor_parallel"] == 2


def pair(folder: Path) -> list[str]:
    """Options that name a tiny pair on disk."""
    target = zoo.build("llama", vocab_size=96)
    small_drafter(target).save_pretrained(folder / "drafter")
    target.save_pretrained(folder / "target")
    tiny.tiny_tokenizer().save_pretrained(folder / "target")
    parts = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return [*parts, "--dtype", "float32", "--device", "cpu"]


def test_only_the_first_rank_speaks(launched, capsys):
    for rank in ("0", "1"):
        launched.setenv("RANK", rank)
        with together.only_first_speaks():
            print(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"


def test_one_process_reports_the_end(launched):
    store = dist.TCPStore(
        "localhost", int(os.environ["MASTER_PORT"]), is_master=True, timeout=timedelta(seconds=5)
    )
    assert [together.is_first_to_fail() for _ in range(3)] == [True, False, False]
    del store
    launched.delenv("WORLD_SIZE")
    assert together.is_first_to_fail(), "alone there is nobody else"


def test_when_the_store_died_with_rank_0_rank_1_reports(launched, capfd):
    found = []
    for rank in ("1", "2", "3"):
        launched.setenv("RANK", rank)
        found.append(together.is_first_to_fail())
    assert found == [True, False, False]
    assert not capfd.readouterr().err


def test_training_keeps_the_whole_target_on_every_rank(launched, tmp_path):
    """One head cannot be split; each process of a training run needs all of it anyway."""
    tiny.tiny_llama(num_attention_heads=1, num_key_value_heads=1).save_pretrained(tmp_path)
    tiny.tiny_tokenizer().save_pretrained(tmp_path)
    together.check_command("train")
    args = Namespace(target=str(tmp_path), dtype="float32", device="cpu")
    target, _, device = load_target(args)
    assert target.device == device == torch.device("cpu")
    assert target.lm_head.weight.shape[0] == target.config.vocab_size
