"""Kernel of `ops.ancestors`: one program per tree, sets doubled along parent pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sizes import power_of_2
from .launch import wrap_triton


@triton.jit
def ancestors_of(parent, index, LEVELS: tl.constexpr):
    """Words of the reflexive ancestor relation; parents come as indices, -1 for none."""
    word = tl.full(parent.shape, 1, tl.int64) << index.to(tl.int64)
    up = parent
    for _ in tl.static_range(LEVELS):  # pyright: ignore[reportGeneralTypeIssues]
        is_up = up[:, None] == index[None, :]
        word |= tl.sum(tl.where(is_up, word[None, :], 0), 1)
        up = tl.sum(tl.where(is_up, (up + 1)[None, :], 0), 1) - 1
    return word


@triton.jit
def _words_kernel(parent_ptr, word_ptr, nodes, LEVELS: tl.constexpr, NODES: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES)
    inside = index < nodes
    parent = tl.load(parent_ptr + b * nodes + index, mask=inside, other=-1).to(tl.int32)
    tl.store(word_ptr + b * nodes + index, ancestors_of(parent, index, LEVELS), mask=inside)


@torch.library.triton_op("eagle4::ancestor_words", mutates_args=())
def _ancestor_words(parent_BN: torch.Tensor) -> torch.Tensor:
    batch, nodes = parent_BN.shape
    word_BN = torch.empty_like(parent_BN)
    size = max(power_of_2(nodes), 2)
    wrap_triton(_words_kernel)[(batch,)](
        parent_BN, word_BN, nodes, LEVELS=doublings(size), NODES=size, num_warps=warps(size)
    )
    return word_BN


def doublings(nodes: int) -> int:
    """Doublings that cover a path through all of ``nodes`` (a power of two)."""
    return nodes.bit_length() - 1


def warps(nodes: int) -> int:
    """Warps that hold a matrix of nodes in registers."""
    return 8 if nodes >= 64 else 4


def ancestor_words(parent_BN: torch.Tensor) -> torch.Tensor:
    """As `ops.ancestors.ancestor_words`."""
    return _ancestor_words(parent_BN.contiguous())
