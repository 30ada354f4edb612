"""What this process runs on, in words that stay the same from run to run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from functools import cache
from pathlib import Path

import torch


@cache
def cpu_name() -> str:
    """Model name of the CPU and the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


@cache
def package_version(package: str) -> str | None:
    """The installed version of a package; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_dir() -> Path:
    """``EAGLE4_CACHE``, else ``XDG_CACHE_HOME/eagle4``, else ``~/.cache/eagle4``."""
    if own := os.environ.get("EAGLE4_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "eagle4"


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the CPU's with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
