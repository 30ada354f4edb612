"""Fixtures that every test may use. Tests import the builders themselves from `tiny`."""

from __future__ import annotations

import os

# The suite never needs a hub; without this a missing file becomes a slow network error.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import tiny
import torch

import eagle4.demo


@pytest.fixture(autouse=True)
def own_profiles(tmp_path_factory, monkeypatch):
    """No test leaves a measured cost table behind or finds another test's."""
    monkeypatch.setenv("EAGLE4_PROFILES", str(tmp_path_factory.mktemp("profiles")))


@pytest.fixture
def target():
    """A tiny random fp32 Llama, fresh for every test."""
    return tiny.tiny_llama()


@pytest.fixture(scope="session")
def tokenizer():
    """The word tokenizer that goes with `target`."""
    return tiny.tiny_tokenizer()


@pytest.fixture(scope="session")
def demo_target():
    """``(target, tokenizer)``: the real small model in fp32, converted once per machine."""
    if eagle4.demo.local_folder() is None:
        pytest.skip(f"the demo model is not installed: {eagle4.demo.HOW_TO_GET}")
    return eagle4.demo.smollm2(dtype=torch.float32)


@pytest.fixture(scope="session")
def demo_drafter_path():
    """Folder of the shipped drafter."""
    try:
        return eagle4.demo.drafter_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def pytest_collection_modifyitems(config, items):
    """Slow tests run when they are asked for (``-m slow``, or by their id); GPU tests need GPUs.

    Kernels run on a GPU or in the interpreter; otherwise `tests/ops/test_interpreted.py` runs them.
    """
    count = torch.cuda.device_count()
    can_run_kernels = count > 0 or os.environ.get("TRITON_INTERPRET") == "1"
    is_asked = bool(config.option.markexpr) or any("::" in arg for arg in config.args)
    if not can_run_kernels and not is_asked:
        elsewhere = [item for item in items if item.get_closest_marker("kernels")]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if not item.get_closest_marker("kernels")]
    for item in items:
        if item.get_closest_marker("slow") and not is_asked:
            item.add_marker(pytest.mark.skip(reason="slow; run it with -m slow"))
        if item.get_closest_marker("kernels") and not can_run_kernels:
            item.add_marker(pytest.mark.skip(reason="needs a GPU or TRITON_INTERPRET=1"))
        if item.get_closest_marker("multi_gpu") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 GPUs, found {count}"))
        elif item.get_closest_marker("cuda") and count < 1:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
