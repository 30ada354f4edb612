"""Catches: an example that no longer runs as it stands. Tiny models stand in for the demo's."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import tiny
import torch

from eagle4 import Eagle4Config, Eagle4Drafter, demo
from eagle4.drafter.pairing import tokenizer_fingerprint
from eagle4.training.dialects import read_files

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs an example with the given words and returns what it printed."""
    # Wide enough for the default candidate head.
    target = tiny.tiny_llama(vocab=256, hidden=128, max_position_embeddings=2048)
    tokenizer = tiny.tiny_tokenizer(vocab=256)
    torch.manual_seed(0)
    config = Eagle4Config.for_target(
        target.config,
        candidate_rank=8,
        num_candidates=16,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
    )
    Eagle4Drafter(config).save_pretrained(tmp_path / "shipped")
    monkeypatch.setattr(demo, "smollm2", lambda *args, **kwargs: (target, tokenizer))
    monkeypatch.setattr(demo, "drafter_path", lambda: tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)

    def run(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_quickstart_compares_three_arms(example):
    out = example("quickstart.py", "--max-new-tokens", "6")
    assert all(arm in out for arm in ("transformers", "plain", "eagle4"))
    assert "accept length 1." in out or "accept length 2." in out
    assert "differs" not in out


def test_pipeline_answers_a_chat_and_a_batch(example):
    out = example("pipeline.py")
    assert "accept length" in out and len(out.strip().split("\n\n")) == 4


def test_stream_chat_answers_every_prompt(example):
    out = example("stream_chat.py", "--prompt", "w1 w2", "--prompt", "w3", "--max-new-tokens", "5")
    assert out.count("tokens per verification") == 2 and "you> w3" in out


def test_tensor_parallel_runs_on_one_process_too(example):
    out = example("tensor_parallel.py", "--max-new-tokens", "6")
    assert "accept length" in out and "exchanged     None" in out


def test_train_drafter_goes_from_nothing_to_a_comparison(example, tmp_path):
    words = ["--num-prompts", "8", "--max-new-tokens", "24", "--steps", "2", "--out", "runs/x"]
    out = example("train_drafter.py", *words)
    assert "this run: accept length" in out and "the shipped drafter: accept length" in out
    assert (tmp_path / "runs/x/drafter/model.safetensors").is_file()


def test_the_standard_library_gives_prompts_that_data_reads(example, tmp_path):
    out = example("recipes/stdlib_prompts.py", "--limit", "40")
    assert out == example("recipes/stdlib_prompts.py", "--limit", "40")
    (tmp_path / "stdlib.jsonl").write_text(out)
    rows = list(read_files([tmp_path / "stdlib.jsonl"]))
    asked = [content.question().messages[-1]["content"] for _, _, content in rows]
    assert len(set(asked)) == 40
    assert 5 < sum("\n\ndef " in prompt for prompt in asked) < 35
