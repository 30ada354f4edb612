"""The nodes of a pool that the target verifies, in depth-first order with the best child first.

The best ``max_nodes`` by path score. The order is stable and parents come before children, so ties
cannot separate a node from its parent. Depth-first order puts the likely path at nodes 0, 1, 2,
..., which makes compaction of the accepted path a copy onto itself in the common case.
"""

from __future__ import annotations

import torch

from ..types import Tree
from .ancestors import ancestor_matrix
from .bits import WORD
from .dispatch import wants_triton

MOST_POOL = 2048  # nodes that one kernel program sorts


def prune(pool: Tree, max_nodes: int, max_depth_B: torch.Tensor, impl: str = "auto") -> Tree:
    """The best ``max_nodes`` nodes of every sequence, none deeper than ``max_depth_B``.

    Returns a `Tree` of ``min(max_nodes, capacity)`` slots; padding as `Tree` says. The kernel takes
    at most 64 nodes out of 2,048.
    """
    capacity = pool.parent_BN.shape[1]

    def fits() -> bool:
        return 0 < min(max_nodes, capacity) <= WORD and capacity <= MOST_POOL

    if wants_triton(impl, pool.score_BN, fits=fits):
        from .triton.prune import prune as kernel

        return kernel(pool, max_nodes, max_depth_B)
    allowed_BN = (pool.depth_BN >= 1) & (pool.depth_BN <= max_depth_B.unsqueeze(1))
    score_BN = pool.score_BN.masked_fill(~allowed_BN, float("-inf"))
    order = score_BN.sort(dim=1, descending=True, stable=True).indices[:, :max_nodes]
    kept_BN = score_BN.gather(1, order) > float("-inf")
    parent_BN = _renumber(pool.parent_BN, order, capacity)
    best_first = Tree(
        pool.token_BN.gather(1, order).masked_fill(~kept_BN, 0),
        parent_BN.masked_fill(~kept_BN, -1),
        pool.depth_BN.gather(1, order).masked_fill(~kept_BN, 0),
        score_BN.gather(1, order),
        kept_BN.sum(dim=1),
    )
    return _depth_first(best_first, kept_BN)


def _renumber(parent_BN: torch.Tensor, order: torch.Tensor, capacity: int) -> torch.Tensor:
    """Parents of the ordered nodes, expressed in the new numbering."""
    batch, kept = order.shape
    place = torch.full((batch, capacity + 1), -1, dtype=torch.int64, device=order.device)
    place.scatter_(1, order, torch.arange(kept, device=order.device).repeat(batch, 1))
    old = parent_BN.gather(1, order)
    return place.gather(1, torch.where(old < 0, capacity, old))


def _depth_first(tree: Tree, kept_BN: torch.Tensor) -> Tree:
    """Reorder a best-first tree: node i moves to the number of nodes that precede it."""
    reach = ancestor_matrix(tree.parent_BN, "torch")
    reach = reach & kept_BN.unsqueeze(1) & kept_BN.unsqueeze(2)
    size_BN = reach.sum(dim=1)  # descendants of j, itself included
    nodes = tree.parent_BN.shape[1]
    earlier = torch.ones(nodes, nodes, dtype=torch.bool, device=size_BN.device).tril(-1)
    sibling = tree.parent_BN.unsqueeze(1) == tree.parent_BN.unsqueeze(2)
    before_BN = ((sibling & earlier) * size_BN.unsqueeze(1)).sum(dim=2)
    place_BN = (reach * (before_BN + 1).unsqueeze(1)).sum(dim=2) - 1
    index_N = torch.arange(nodes, device=size_BN.device)
    place_BN = torch.where(kept_BN, place_BN, index_N)
    order = torch.empty_like(place_BN).scatter_(1, place_BN, index_N.expand_as(place_BN))
    return Tree(
        tree.token_BN.gather(1, order),
        _renumber(tree.parent_BN, order, nodes),
        tree.depth_BN.gather(1, order),
        tree.score_BN.gather(1, order),
        tree.count_B,
    )
