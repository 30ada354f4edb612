"""Growing a tree level by level (EAGLE-2 dynamic drafting).

Every level expands the frontier by ``top_k`` children each; the best ``top_k`` of them by path
score are the next frontier. All children stay in the pool, because a broad shallow node may beat a
deep one when the tree is pruned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import grow_level, prune
from ..types import Candidates, Tree


class Growth(NamedTuple):
    """A tree under construction."""

    pool: Tree  # every node drafted so far
    frontier_BK: torch.Tensor  # pool indices that the next level expands, best first
    depth: int  # levels drafted
    first: int = 0  # pool index of the last level's first node


def pool_capacity(max_depth: int, top_k: int) -> int:
    """Nodes that ``max_depth`` levels can produce."""
    return top_k + (max_depth - 1) * top_k * top_k


def start(candidates: Candidates, max_depth: int, top_k: int) -> Growth:
    """Level 1 from one `Candidates` row per sequence; all of them form the frontier."""
    token_BK, logp_BK = candidates
    batch, width = token_BK.shape
    capacity = pool_capacity(max_depth, top_k)
    device = token_BK.device
    pool = Tree(
        torch.zeros(batch, capacity, dtype=torch.int64, device=device),
        torch.full((batch, capacity), -1, dtype=torch.int64, device=device),
        torch.zeros(batch, capacity, dtype=torch.int64, device=device),
        torch.full((batch, capacity), float("-inf"), device=device),
        torch.full((batch,), width, dtype=torch.int64, device=device),
    )
    pool.token_BN[:, :width] = token_BK
    pool.depth_BN[:, :width].fill_(1)
    pool.score_BN[:, :width] = logp_BK
    frontier_BK = torch.arange(width, device=device).repeat(batch, 1)
    return Growth(pool, frontier_BK, 1)


def narrow(growth: Growth, width: int) -> Growth:
    """Expand only the best ``width`` nodes of the frontier next."""
    return growth._replace(frontier_BK=growth.frontier_BK[:, :width])


def extend(growth: Growth, candidates: Candidates, top_k: int) -> Growth:
    """Add the children of the frontier; ``candidates`` rows are (sequence, frontier) pairs.

    The pool is written in place: go on with the returned growth, not with the given one.
    """
    pool, frontier_BK, depth, _ = growth
    children = candidates.token_RK.numel() // len(frontier_BK)
    first = int(pool.count_B[0])
    best_BK = grow_level(pool, frontier_BK, candidates, top_k)
    grown = pool._replace(count_B=pool.count_B + children)
    return Growth(grown, first + best_BK, depth + 1, first)


def take(pool: Tree, chosen_BN: torch.Tensor, most: int) -> Tree:
    """The chosen nodes of every sequence (closed under ancestors, at most ``most``) as a tree."""
    score_BN = pool.score_BN.masked_fill(~chosen_BN, float("-inf"))
    unlimited_B = torch.full_like(pool.count_B, pool.depth_BN.shape[1])
    return prune(pool._replace(score_BN=score_BN), most, unlimited_B)


def is_saturated(growth: Growth, max_nodes: int) -> torch.Tensor:
    """``[B]`` bool: no deeper node can enter the best ``max_nodes`` any more.

    Children score at most what their parent scores, so once ``max_nodes`` nodes of the pool reach
    the frontier's best score, another level changes nothing. Exact, not a heuristic.
    """
    best_B = growth.pool.score_BN.gather(1, growth.frontier_BK).amax(dim=1)
    return (growth.pool.score_BN >= best_B.unsqueeze(1)).sum(dim=1) >= max_nodes
