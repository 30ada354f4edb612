"""Ancestor sets of a tree: as a boolean matrix, or as int64 words of at most 64 nodes."""

from __future__ import annotations

import torch

from .bits import WORD, pack_bits, unpack_bits
from .dispatch import wants_triton


def ancestor_matrix(parent_BN: torch.Tensor, impl: str = "auto") -> torch.Tensor:
    """``[B, N, N]`` bool: entry (i, j) is True when j is i or an ancestor of i.

    ``parent_BN`` int64, -1 for children of the root. The kernel takes at most 64 nodes.
    """
    batch, nodes = parent_BN.shape
    if wants_triton(impl, parent_BN, fits=lambda: 0 < nodes <= WORD):
        return unpack_bits(ancestor_words(parent_BN, impl).unsqueeze(-1), nodes)
    # The reflexive parent relation is squared until paths of any length are covered.
    reach = torch.eye(nodes, device=parent_BN.device).repeat(batch, 1, 1)
    has_parent = (parent_BN >= 0).to(reach.dtype).unsqueeze(-1)
    reach.scatter_add_(2, parent_BN.clamp_min(0).unsqueeze(-1), has_parent)
    covered = 1
    while covered < nodes:
        reach = (torch.bmm(reach, reach) > 0).to(reach.dtype)
        covered *= 2
    return reach > 0


def ancestor_words(parent_BN: torch.Tensor, impl: str = "auto") -> torch.Tensor:
    """``[B, N]`` int64: bit j of entry i is set when j is i or an ancestor of i; N <= 64."""
    nodes = parent_BN.shape[1]
    if nodes > WORD:
        raise ValueError(f"a tree of {nodes} nodes does not fit into words of {WORD} bits")
    if wants_triton(impl, parent_BN, fits=lambda: nodes > 0):
        from .triton.ancestors import ancestor_words as kernel

        return kernel(parent_BN)
    if not nodes:
        return torch.zeros_like(parent_BN)
    return pack_bits(ancestor_matrix(parent_BN, "torch")).squeeze(-1)
