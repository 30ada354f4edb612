"""All-reduce, residual addition and RMSNorm in one: what follows a row-parallel layer of a block.

    total  = sum over ranks of part            rounded to the dtype of the parts
    hidden = residual + total                  rounded
    normed = gain * round(hidden / RMS(hidden))    RMS in float32, as in Llama's RMSNorm

    "torch"     the reference: the group's own sum, addition and the norm's module
    "one_shot"  the same with the sum of PyTorch's symmetric-memory kernel (see `rank_sum`)
    "triton"    one kernel (see `ops.triton.sum_add_norm`): it shows this rank's part to the others,
                meets them, adds up all parts in rank order in float32, and goes on in registers

The kernel takes rows that are small together, as those of a decoding step; larger parts (prefills)
go through `rank_sum`. As there, the operator is opaque, so that sizes are looked at when it runs
and the memory stays where the peers look for it, and finds its memory by the group's name.

It serves blocks whose code is ours, the drafter's. A target's block is Transformers' code: its
residual addition and its norm are lines of the decoder layer's forward, which no module put around
a projection can reach without replacing that forward family by family. There `rank_sum` joins the
parts, and Inductor fuses the addition with the norm behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from .rank_sum import MAX_BYTES, is_small, rank_sum

IMPLS = ("torch", "one_shot", "triton")
NUM_PROGRAMS = 32  # of the kernel; row r is the business of program r % NUM_PROGRAMS on every rank
MOST_ROW_BYTES = 32 << 10
REGION_BYTES = MOST_ROW_BYTES + MAX_BYTES // NUM_PROGRAMS  # all rows of one program

_library = torch.library.Library("eagle4", "FRAGMENT")
_library.define(
    "sum_add_norm(Tensor part, Tensor residual, Tensor gain, float eps, str group_name)"
    " -> (Tensor, Tensor)"
)


class Peers(NamedTuple):
    """Memory that all ranks of a group read and write; every rank's is laid out alike.

    Two regions of ``REGION_BYTES`` for each program, then int32 ``[NUM_PROGRAMS, W]``: the last
    launch in which rank w was ready, and int32 ``[NUM_PROGRAMS]``: this rank's last launch.
    """

    memory: torch.Tensor  # this rank's, uint8
    address_W: torch.Tensor  # int64, of every rank's memory as this rank sees it
    rank: int


_memory: dict[str, torch.Tensor] = {}
_peers: dict[str, Peers] = {}


def sum_add_norm(
    part: torch.Tensor,
    residual: torch.Tensor,
    norm: nn.Module,
    group_name: str,
    impl: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual`` plus the sum of every rank's ``part``, and its norm: both ``[..., H]``.

    ``part`` and ``residual`` have one shape, the same on all ranks; the residual is the same on all
    ranks. ``norm`` has ``weight [H]`` and ``variance_epsilon`` (Llama's RMSNorm).
    ``impl="one_shot"`` needs the scratch of `rank_sum` before, ``impl="triton"`` that and
    `open_memory` and `share_memory`, on every rank. Raises `ValueError` for an unknown ``impl``.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not understood; pass one of {', '.join(IMPLS)}")
    if impl == "triton":
        eps = float(norm.variance_epsilon)  # type: ignore[arg-type]
        return torch.ops.eagle4.sum_add_norm(part, residual, norm.weight, eps, group_name)
    hidden = residual + rank_sum(part, group_name, impl)
    return hidden, norm(hidden)


def fits(part: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> bool:
    """Whether the kernel takes these. It depends on what is the same on all ranks."""
    is_alike = part.dtype == residual.dtype == gain.dtype and part.shape == residual.shape
    return is_alike and is_small(part) and part.shape[-1] * part.element_size() <= MOST_ROW_BYTES


@torch.library.impl(_library, "sum_add_norm", "CompositeExplicitAutograd")
def _sum_add_norm(
    part: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if not fits(part, residual, gain):
        hidden = (residual + rank_sum(part, group_name, "one_shot")).contiguous()
        return hidden, _rms_norm(hidden, gain, eps)
    from .triton.sum_add_norm import sum_add_norm as kernel

    return kernel(part, residual, gain, eps, _peers[group_name])


@torch.library.register_fake("eagle4::sum_add_norm", lib=_library)
def _fake_sum_add_norm(
    part: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(residual.dtype, part.dtype)
    hidden = torch.empty_like(residual, dtype=dtype, memory_format=torch.contiguous_format)
    return hidden, torch.empty_like(hidden, dtype=torch.promote_types(gain.dtype, dtype))


def _rms_norm(hidden: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Llama's RMSNorm, cast by cast."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(hidden.dtype)


# -- memory ------------------------------------------------------------------------------------


def memory_bytes(world_size: int) -> int:
    """What `Peers.memory` takes on every rank."""
    return NUM_PROGRAMS * (2 * REGION_BYTES + 4 * (world_size + 1))


def open_memory(group_name: str, world_size: int, device: torch.device) -> None:
    """Allocate what the others will read. Raises `RuntimeError` where that cannot be done."""
    from torch.distributed import _symmetric_memory

    size = memory_bytes(world_size)
    _memory[group_name] = _symmetric_memory.empty(size, dtype=torch.uint8, device=device).zero_()
    if device.type == "cuda":  # nobody may be ready before these zeros are written
        torch.cuda.synchronize(device)


def share_memory(group_name: str) -> None:
    """Show it to the others: a collective, which waits for all of them.

    Raises `RuntimeError` where another rank's memory has no address here.
    """
    from torch.distributed import _symmetric_memory

    memory = _memory[group_name]
    handle = _symmetric_memory.rendezvous(memory, group_name)  # type: ignore[arg-type]
    addresses = list(handle.buffer_ptrs)
    if not all(addresses) or addresses[handle.rank] != memory.data_ptr():
        raise RuntimeError("symmetric memory has no addresses of all peers")
    address_W = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
    _peers[group_name] = Peers(memory, address_W, handle.rank)


def compile_kernel(group_name: str, width: int, dtype: torch.dtype) -> None:
    """Compile for rows of this kind without a launch, in which a rank would wait for the others."""
    from .triton.sum_add_norm import compile_kernel

    compile_kernel(width, dtype, _peers[group_name])


def close_memory(group_name: str) -> None:
    """Give it back; nothing happens when there is none."""
    _peers.pop(group_name, None)
    _memory.pop(group_name, None)
