"""Join the processes that a launcher started: `torchrun --nproc-per-node 4 ...`.

The backend follows the device and is the same on all ranks, which is checked once, together with
the versions that the arithmetic depends on; then the ranks choose how they add up (see `sums`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..machine import package_version
from ..pair import hub_config
from .plan import check_size
from .ranks import Ranks
from .sums import choose_fused, choose_sum

TIMEOUT_S = 300.0  # silence of a rank after which the others stop
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def launched_size() -> int:
    """How many processes a launcher started beside and including this one; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's number among them."""
    return int(os.environ.get("RANK", "0"))


def start(
    target: Any, tp_size: int, device: torch.device | str | None, hub: Mapping[str, Any]
) -> Ranks:
    """`join`, once it is known that the target (a model, a folder or a hub id) can be split.

    ``hub``: arguments of `from_pretrained`, some of which say where a configuration is found.
    """
    is_loaded = isinstance(target, PreTrainedModel)
    check_size(target.config if is_loaded else hub_config(target, hub), tp_size)
    return join(tp_size, device)


def join(
    tp_size: int, device: torch.device | str | None = None, timeout_s: float = TIMEOUT_S
) -> Ranks:
    """The group of ``tp_size`` processes that this one belongs to.

    ``device``: ``"cpu"`` or ``"cuda"`` (then every process takes the GPU of its local rank); None
    takes GPUs where there are any. A group that the caller has initialised is used as it is. Raises
    `ValueError` when the processes are not there, or when they do not run the same software.
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if kind not in BACKENDS:
        raise ValueError(f"tensor parallelism runs on {sorted(BACKENDS)}, not on {kind!r}")
    place = torch.device("cpu")
    if kind == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        check_launched(tp_size)
        limit = timedelta(seconds=timeout_s)
        device_id = place if kind == "cuda" else None
        dist.init_process_group(BACKENDS[kind], timeout=limit, device_id=device_id)
    if dist.get_world_size() != tp_size:
        raise ValueError(
            f"tp_size={tp_size}, but the process group has {dist.get_world_size()} ranks; they "
            "must be equal"
        )
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD, place)
    _check_alike(ranks, {"device": kind, "backend": ranks.backend, **_versions()})
    ranks.sum_impl = choose_sum(ranks)
    ranks.is_fused = choose_fused(ranks)
    return ranks


def check_launched(tp_size: int) -> None:
    """Raise `ValueError` unless a launcher started exactly ``tp_size`` processes."""
    if launched_size() != tp_size or "RANK" not in os.environ:
        raise ValueError(
            f"tp_size={tp_size} needs {tp_size} processes, but this is one of {launched_size()}; "
            f"start them with `torchrun --nproc-per-node {tp_size} ...`"
        )


def _versions() -> dict[str, Any]:
    return {name: package_version(name) for name in ("torch", "transformers", "eagle4")}


def _check_alike(ranks: Ranks, here: dict[str, Any]) -> None:
    """Raise `ValueError` on every rank when they differ in what they run on."""
    found = ranks.gather_objects(here)
    different = sorted(key for key in here if any(other[key] != found[0][key] for other in found))
    if different:
        shown = "; ".join(f"{key}: {[other[key] for other in found]}" for key in different)
        raise ValueError(f"the ranks differ in {shown}; they must run the same software")
