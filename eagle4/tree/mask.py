"""Ancestor sets of a tree as a boolean matrix."""

from __future__ import annotations

import torch


def ancestor_matrix(parent_BN: torch.Tensor) -> torch.Tensor:
    """``[B, N, N]`` bool: entry (i, j) is True when j is i or an ancestor of i.

    The reflexive parent relation is squared until paths of any length are covered.
    """
    batch, nodes = parent_BN.shape
    reach = torch.eye(nodes, device=parent_BN.device).repeat(batch, 1, 1)
    has_parent = (parent_BN >= 0).to(reach.dtype).unsqueeze(-1)
    reach.scatter_add_(2, parent_BN.clamp_min(0).unsqueeze(-1), has_parent)
    covered = 1
    while covered < nodes:
        reach = (torch.bmm(reach, reach) > 0).to(reach.dtype)
        covered *= 2
    return reach > 0
