"""What a number was measured on: without this block a benchmark says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..machine import cpu_name, package_version

PACKAGES = ("torch", "transformers", "triton", "tokenizers", "safetensors", "numpy")


def describe_environment() -> dict[str, Any]:
    """Hardware, threads, load, versions, commit and command, as plain values."""
    return {
        "hardware": _hardware(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in ("eagle4", *PACKAGES)},
        "commit": _commit(),
        "command": _command(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_model(model) -> dict[str, Any]:
    """Name, class, parameters, dtype and device of a model. Folders are shown by name only."""
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    first = next(model.parameters())
    return {
        "name": _short(name),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(first.dtype).removeprefix("torch."),
        "device": str(first.device),
    }


def _hardware() -> str:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if gpus:
        return f"{len(gpus)} x {gpus[0]}, host {cpu_name()}"
    return cpu_name()


def _commit() -> str | None:
    """The commit of this library's checkout, marked when files differ from it."""
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if _git(folder, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return done.stdout.strip()


def _command(argv: list[str]) -> str:
    program = Path(argv[0]).name if argv else ""
    if program in ("__main__.py", "eagle4"):
        program = "eagle4"
    return " ".join([program, *map(_short, argv[1:])])


def _short(word: str) -> str:
    # An absolute path means nothing elsewhere and tells where the user keeps things.
    return Path(word).name if Path(word).is_absolute() else word
