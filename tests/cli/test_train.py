"""Catches: `eagle4 train` under a launcher that is refused, splits the target instead of the steps,
writes or prints once per process, or trains something else than one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from eagle4.cli import main

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    *("batch_size=3", "num_anchors=6", "num_depths=2", "held_out_fraction=0.3", "eval_every=3"),
    *("decode_prompts=1", "decode_tokens=8", "precision=float32", "ema_decay=0.5"),
)
SMALL = ("intermediate_size=48", "candidate_rank=8", "num_candidates=16")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """`eagle4 train` without --out, on data of a target whose three heads two cannot share."""
    root = tmp_path_factory.mktemp("pair")
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden": 48}
    tiny.tiny_llama(**heads).save_pretrained(root / "target")
    tiny.tiny_tokenizer().save_pretrained(root / "target")
    rows = [{"conversations": [{"role": "user", "content": f"w{i} w{i + 3}"}]} for i in range(8)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    target = ["--target", str(root / "target")]
    data = ["data", *target, "--dtype", "float32", "--prompts", str(root / "prompts.jsonl")]
    assert main([*data, "--max-new-tokens", "24", "--out", str(root / "data")]) == 0
    words = ["train", *target, "--data", str(root / "data"), "--steps", "6", "--device", "cpu"]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    words += [word for setting in SMALL for word in ("--drafter-set", setting)]
    return [*words, "--candidate-set", "steps=3", "--candidate-set", "num_runs=4"]


def records(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_train_what_one_does(words, tmp_path):
    single, double = tmp_path / "single", tmp_path / "double"
    assert main([*words, "--out", str(single)]) == 0
    shared = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "eagle4", *words, "--out", str(double)]
    done = subprocess.run(
        launch, capture_output=True, text=True, timeout=600, env={**os.environ, **shared}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["out"] == str(double / "drafter")
    assert sorted(path.name for path in single.iterdir()) == sorted(
        path.name for path in double.iterdir()
    )
    for a, b in zip(records(single), records(double), strict=True):
        assert a["step"] == b["step"] and ("loss" in a) == ("loss" in b)
        assert "loss" not in a or b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    files = [load_file(folder / "training_state.safetensors") for folder in (single, double)]
    assert files[0].keys() == files[1].keys()
    for key, value in files[0].items():
        torch.testing.assert_close(files[1][key], value, rtol=2e-3, atol=3e-4, msg=key)
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (single, double)]
    assert metrics[1]["kl"] == pytest.approx(metrics[0]["kl"], rel=1e-2)
    assert metrics[1]["tau_measured"] == metrics[0]["tau_measured"]
