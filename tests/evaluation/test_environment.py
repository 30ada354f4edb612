"""Catches: a result without hardware, versions or command, and one that gives away local paths."""

from __future__ import annotations

import json
import sys

from eagle4.evaluation.environment import describe_environment, describe_model


def test_the_block_is_complete_and_plain(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["/usr/bin/eagle4", "bench", "--prompts", str(tmp_path / "mt_bench.jsonl")]
    )
    block = json.loads(json.dumps(describe_environment()))
    assert block["command"] == "eagle4 bench --prompts mt_bench.jsonl"
    assert block["hardware"] and block["torch_threads"] >= 1
    assert block["versions"]["torch"] and block["versions"]["transformers"]
    assert {"commit", "date", "python", "platform", "cpu_capability"} <= set(block)
    assert str(tmp_path) not in json.dumps(block)


def test_a_model_is_described_without_its_folder(target, tmp_path):
    target.config._name_or_path = str(tmp_path / "my-model")
    described = describe_model(target)
    assert described["name"] == "my-model" and described["dtype"] == "float32"
    assert described["parameters"] == sum(p.numel() for p in target.parameters())
