"""The sum of a tensor over the ranks of a group: what joins the parts of a row-parallel layer.

    "torch"     the reference: a functional collective, gloo on CPUs, NCCL on CUDA
    "one_shot"  PyTorch's symmetric-memory kernel: every rank puts its part where the others can
                read it and adds up all parts itself, in rank order, so all get the same bits

One-shot is a single launch, which is what counts while parts are small, as in a decoding step; it
reads every part on every rank, so larger ones (prefills) go through the reference.

It is an operator of its own for three reasons: the size is looked at when it runs, so compiled
graphs are not split by it; Inductor's lowering of PyTorch's operator wants static shapes; and
compilers may copy what a graph is given, while the scratch has to stay where the peers look for it.
So the scratch is found by the group's name, like the group itself. What follows the sum in a block
of ours, the residual and a norm, can be part of the kernel: see `sum_add_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # noqa: F401  (registers the operators)

IMPLS = ("torch", "one_shot")
MAX_BYTES = 128 << 10  # of a part; where PyTorch's own compiler stops choosing one-shot
DTYPES = (torch.float32, torch.bfloat16)  # of PyTorch's kernel

_library = torch.library.Library("eagle4", "FRAGMENT")
_library.define("one_shot_sum(Tensor part, str group_name) -> Tensor")
_scratch: dict[str, torch.Tensor] = {}


def rank_sum(part: torch.Tensor, group_name: str, impl: str = "torch") -> torch.Tensor:
    """The sum of every rank's ``part``; all have one shape and dtype.

    ``impl="one_shot"`` needs `open_scratch` and `share_scratch` on every rank before. Raises
    `ValueError` for an unknown ``impl``.
    """
    if impl == "torch":
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(part, "sum", group_name))
    if impl != "one_shot":
        raise ValueError(f"impl={impl!r} is not understood; pass one of {', '.join(IMPLS)}")
    return torch.ops.eagle4.one_shot_sum(part, group_name)


def is_small(part: torch.Tensor) -> bool:
    """Whether the one-shot kernel takes this part. It depends on what is the same on all ranks."""
    num_bytes = part.numel() * part.element_size()
    return part.dtype in DTYPES and 0 < num_bytes <= MAX_BYTES and num_bytes % 4 == 0


@torch.library.impl(_library, "one_shot_sum", "CompositeExplicitAutograd")
def _one_shot_sum(part: torch.Tensor, group_name: str) -> torch.Tensor:
    part = part.contiguous()
    if not is_small(part):
        return rank_sum(part, group_name)
    if part.storage_offset():  # the kernel wants part and scratch to be aligned alike
        part = part.clone()
    place = _scratch[group_name][: part.numel() * part.element_size()]
    symmetric: Any = torch.ops.symm_mem
    return symmetric.one_shot_all_reduce_copy(
        place.view(part.dtype).view(part.shape), part, "sum", group_name
    )


@torch.library.register_fake("eagle4::one_shot_sum", lib=_library)
def _fake_sum(part: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


def open_scratch(group_name: str, device: torch.device) -> None:
    """Allocate what the others will read. Raises `RuntimeError` where that cannot be done."""
    from torch.distributed import _symmetric_memory

    _scratch[group_name] = _symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)


def share_scratch(group_name: str) -> None:
    """Show it to the others: a collective, which waits for all of them."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.rendezvous(_scratch[group_name], group_name)  # type: ignore[arg-type]


def close_scratch(group_name: str) -> None:
    """Give it back; nothing happens when there is none."""
    _scratch.pop(group_name, None)
