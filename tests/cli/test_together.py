"""Catches: a command that starts on several ranks without sharing anything, ranks that all print,
an error that every rank reports or none, a target that training splits."""

from __future__ import annotations

import logging
import os
import socket
from argparse import Namespace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import transformers
from tiny import tiny_llama, tiny_tokenizer

from eagle4.cli import main, together
from eagle4.cli.common import load_target


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


@pytest.mark.parametrize("command", ["chat", "bench", "check", "profile"])
def test_commands_of_one_process_say_so(launched, capsys, command):
    launched.setattr(together, "is_first_to_fail", lambda: True)
    assert main([command]) == 2
    assert f"`eagle4 {command}` runs in one process" in capsys.readouterr().err


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
    tiny_llama(num_attention_heads=1, num_key_value_heads=1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    together.check_command("train")
    args = Namespace(target=str(tmp_path), dtype="float32", device="cpu")
    target, _, device = load_target(args, is_whole=True)
    assert target.device == device == torch.device("cpu")
    with pytest.raises(ValueError, match="heads"):
        load_target(args)
