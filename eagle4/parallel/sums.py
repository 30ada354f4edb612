"""How the ranks add up: decided once, at the start, by all of them together.

One-shot sums need peers that can read each other's memory. Every step towards them is tried by all
ranks and reported to all, so either all go on or none does: a rank that went on alone would wait in
the next step for ever. Where they cannot be had, and on CPUs, the group's own backend adds up.
Where they can, and kernels are asked for, the kernel that goes on with residual and norm is tried
in the same way.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..ops.dispatch import has_kernels
from ..ops.rank_sum import (
    DTYPES,
    MAX_BYTES,
    close_scratch,
    open_scratch,
    rank_sum,
    share_scratch,
)
from ..ops.sum_add_norm import (
    close_memory,
    compile_kernel,
    open_memory,
    share_memory,
    sum_add_norm,
)

if TYPE_CHECKING:
    from .ranks import Ranks

logger = logging.getLogger("eagle4")

WIDTHS = (576, 4096)  # of the rows with which the fused kernel is tried
Place = tuple[str, int | None]  # host and number of the GPU that a rank runs on


def choose_sum(ranks: Ranks, device_type: str = "cuda") -> str:
    """``impl`` of `ops.rank_sum.rank_sum` for this group; the same on all ranks.

    ``device_type``: whose memory peers can read. ``EAGLE4_ONE_SHOT=0``, on any of the ranks, turns
    one-shot sums off.
    """
    if ranks.device.type != device_type:
        return "torch"
    places: list[Place] = ranks.gather_objects((platform.node(), ranks.device.index))
    steps = (
        lambda: check_place(places, ranks.rank),
        lambda: open_scratch(ranks.name, ranks.device),
        lambda: share_scratch(ranks.name),
        lambda: check_sum(ranks),
    )
    problem = first_problem(ranks, steps)
    if problem is None:
        return "one_shot"
    close_scratch(ranks.name)
    if ranks.is_first:
        logger.warning("sums over ranks by %s, not one-shot: %s", ranks.backend, problem)
    return "torch"


def choose_fused(ranks: Ranks) -> bool:
    """Whether sums go on with residual and norm in one kernel; the same on all ranks.

    Only where sums are one-shot and all ranks ask for kernels (see `ops.dispatch`).
    """
    if ranks.sum_impl != "one_shot":
        return False
    if not all(ranks.gather_objects(has_kernels(ranks.device))):
        return False
    steps = (
        lambda: open_memory(ranks.name, ranks.size, ranks.device),
        lambda: share_memory(ranks.name),
        lambda: [compile_kernel(ranks.name, *kind) for kind in itertools.product(WIDTHS, DTYPES)],
        lambda: check_sum_add_norm(ranks),
    )
    problem = first_problem(ranks, steps)
    if problem is None:
        return True
    close_memory(ranks.name)
    if ranks.is_first:
        logger.warning("residuals and norms are not part of one-shot sums: %s", problem)
    return False


def first_problem(ranks: Ranks, steps: tuple[Callable[[], object], ...]) -> str | None:
    """Take all steps, each on all ranks; why the first of them failed anywhere, None if none did.

    After a failure no rank takes the next step.
    """
    for step in steps:
        if problem := next(filter(None, ranks.gather_objects(_problem(step))), None):
            return problem
    return None


def _problem(step: Callable[[], object]) -> str | None:
    try:
        step()
    except (RuntimeError, AttributeError, ImportError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def check_place(
    places: list[Place],
    rank: int,
    can_read: Callable[[int, int], bool] = torch.cuda.can_device_access_peer,
) -> None:
    """Raise `RuntimeError` where peers cannot read each other's memory, or must not be asked to.

    ``can_read``: whether one GPU of this host reads another's memory.
    """
    if os.environ.get("EAGLE4_ONE_SHOT") == "0":
        raise RuntimeError("EAGLE4_ONE_SHOT=0")
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        raise RuntimeError("this PyTorch has no symm_mem.one_shot_all_reduce_copy")
    if len({host for host, _ in places}) > 1:
        raise RuntimeError("the ranks are on several hosts")
    mine = places[rank][1]
    # Processes that were given one GPU each all call it number 0; the rendezvous tells them apart.
    others = sorted({index for _, index in places if index != mine and index is not None})
    if blind := [index for index in others if mine is not None and not can_read(mine, index)]:
        raise RuntimeError(f"GPU {mine} cannot read the memory of {blind}")


def check_sum(ranks: Ranks) -> None:
    """Raise `RuntimeError` when one-shot sums of small integers are wrong.

    All sums come before the first verdict: every rank has to take part in every one of them.
    """
    wrong = []
    for dtype in DTYPES:
        for count in (2, 100, MAX_BYTES // dtype.itemsize):
            digit = torch.arange(count, device=ranks.device).remainder(7)
            total = rank_sum((digit + ranks.rank % 2).to(dtype), ranks.name, "one_shot")
            if not torch.equal(total, (digit * ranks.size + ranks.size // 2).to(dtype)):
                wrong.append(f"{count} {dtype}")
    if wrong:
        raise RuntimeError(f"one-shot sums of {', '.join(wrong)} numbers are wrong")


def check_sum_add_norm(ranks: Ranks) -> None:
    """Raise `RuntimeError` when the fused kernel's sums or norms of small integers are wrong.

    Every kind is tried more often than the kernel has places for parts, and all of them before the
    first verdict.
    """
    wrong = []
    for width, dtype, rows in itertools.product(WIDTHS, DTYPES, (1, 3, 7, 3)):
        digit = torch.arange(rows * width, device=ranks.device).remainder(7).view(rows, width)
        norm = LlamaRMSNorm(width).to(ranks.device, dtype)
        part, residual = (digit + ranks.rank % 2).to(dtype), digit.flip(0).to(dtype)
        with torch.no_grad():
            hidden, normed = sum_add_norm(part, residual, norm, ranks.name, "triton")
            total = (digit * ranks.size + ranks.size // 2).to(dtype)
            near = torch.allclose(normed, norm(residual + total), rtol=2e-2, atol=1e-5)
        if not (torch.equal(hidden, residual + total) and near):
            wrong.append(f"{rows} x {width} {dtype}")
    if wrong:
        raise RuntimeError(f"fused sums and norms of {', '.join(wrong)} numbers are wrong")
