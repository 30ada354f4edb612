"""One level of a growing tree: children into the pool, the best of them as the next frontier.

Source: EAGLE-2 dynamic drafting; DESIGN.md section 6.
"""

from __future__ import annotations

import torch

from ..types import Candidates, Tree
from .dispatch import wants_triton

MOST_CHILDREN = 1024  # of one level, that one kernel program sorts


def grow_level(
    pool: Tree,
    frontier_BK: torch.Tensor,
    candidates: Candidates,
    top_k: int,
    impl: str = "auto",
) -> torch.Tensor:
    """Write the frontier's children behind ``pool.count_B`` nodes; return the best of them.

    ``frontier_BK`` pool indices of the expanded nodes, ``candidates`` rows (sequence, frontier)
    with J children each, one deeper than their parents. Returns ``[B, min(top_k, K J)]`` int64
    offsets among the new children, best first, ties to the earlier one. The pool is written in
    place, its ``count_B`` is left to the caller. A child never scores above its parent.
    """
    children = candidates.token_RK.numel() // max(len(frontier_BK), 1)
    if wants_triton(impl, frontier_BK, fits=lambda: 0 < children <= MOST_CHILDREN):
        from .triton.grow_level import grow_level as kernel

        return kernel(pool, frontier_BK, candidates, top_k)
    batch, width = frontier_BK.shape
    token_BC = candidates.token_RK.reshape(batch, -1)
    parent_BC = frontier_BK.repeat_interleave(children // width, dim=1)
    parent_score_BC = pool.score_BN.gather(1, parent_BC)
    # A rounded log-probability above zero must not lift a child over its parent.
    score_BC = parent_score_BC + candidates.logp_RK.reshape(batch, -1).clamp_max(0.0)
    index_C = torch.arange(children, device=token_BC.device)
    column_BC = pool.count_B.unsqueeze(1) + index_C
    pool.token_BN.scatter_(1, column_BC, token_BC)
    pool.parent_BN.scatter_(1, column_BC, parent_BC)
    pool.depth_BN.scatter_(1, column_BC, pool.depth_BN.gather(1, parent_BC) + 1)
    pool.score_BN.scatter_(1, column_BC, score_BC)
    return score_BC.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
