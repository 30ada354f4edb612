"""Runs every test marked ``kernels`` under the Triton interpreter.

The interpreter is chosen when Triton is imported, so it needs a process of its own: one for all.
With a GPU the same tests run on it, in this process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def interpret(marks: str, timeout: int) -> int:
    """Run the marked tests; returns how many passed."""
    command = [sys.executable, "-m", "pytest", "tests/ops", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", marks],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and "skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
    return int(passed[1])


needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels run on the GPU, in their own tests"
)


@needs_interpreter
def test_every_kernel_agrees_with_its_reference():
    assert interpret("kernels and not slow", timeout=600) > 50


@needs_interpreter
@pytest.mark.slow
def test_every_kernel_agrees_on_many_more_inputs():
    assert interpret("kernels and slow", timeout=3600) > 0
