"""The shape of a sampled tree, fixed before anything is drawn (rejection sampling).

A shape may depend on earlier rounds only. It is the best n slots by expected survival: the chance
that a slot's node is accepted is the product of the acceptance of its rank along its path.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch

from ..types import Drawn, Law, Tree


class Template(NamedTuple):
    """Slots in depth-first order, elder siblings first. Parents are indices, -1 is the root."""

    parent: tuple[int, ...]
    rank: tuple[int, ...]  # 0 is the first draw among the siblings
    depth: tuple[int, ...]  # 1 for children of the root


def best_template(
    acceptance: list[list[float]], max_nodes: int, top_k: int, min_survival: float
) -> Template:
    """At most ``max_nodes`` slots, none with a chance of survival below ``min_survival``.

    ``acceptance[d][r]``: chance that the child of rank r is the one accepted at depth d + 1, given
    that its parent was; as deep as the list, at most ``top_k`` siblings. The first slot is always
    there.
    """
    slots: list[tuple[int, int, int]] = []  # parent, rank, depth: parents before children
    heap = [(-acceptance[0][0], -1, 0, 1, 1.0)]
    while heap and len(slots) < max_nodes:
        negative, parent, rank, depth, above = heapq.heappop(heap)
        if slots and -negative < min_survival:
            break
        index, survival = len(slots), -negative
        slots.append((parent, rank, depth))
        if rank + 1 < top_k:
            younger = min(survival, above * acceptance[depth - 1][rank + 1])
            heapq.heappush(heap, (-younger, parent, rank + 1, depth, above))
        if depth < len(acceptance):
            child = survival * acceptance[depth][0]
            heapq.heappush(heap, (-child, index, 0, depth + 1, survival))
    return _depth_first(slots)


def _depth_first(slots: list[tuple[int, int, int]]) -> Template:
    children: dict[int, list[int]] = {}
    for index, (parent, _, _) in enumerate(slots):
        children.setdefault(parent, []).append(index)
    order: list[int] = []
    stack = list(reversed(children.get(-1, [])))
    while stack:
        index = stack.pop()
        order.append(index)
        stack += sorted(children.get(index, []), key=lambda i: -slots[i][1])
    place = {-1: -1} | {index: new for new, index in enumerate(order)}
    return Template(
        tuple(place[slots[index][0]] for index in order),
        tuple(slots[index][1] for index in order),
        tuple(slots[index][2] for index in order),
    )


def keep_slots(drawn: Drawn, kept_BN: torch.Tensor) -> Drawn:
    """The tree without some slots, in the same order. With a node all its descendants must go."""
    tree, law = drawn
    order = (~kept_BN).sort(dim=1, stable=True).indices
    kept_BN = kept_BN.gather(1, order)
    batch, nodes = order.shape
    place = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=order.device)
    place.scatter_(1, order, torch.arange(nodes, device=order.device).repeat(batch, 1))
    parent_BN = tree.parent_BN.gather(1, order)
    parent_BN = place.gather(1, torch.where(parent_BN < 0, nodes, parent_BN))
    rows = torch.cat([torch.zeros_like(order[:, :1]), order + 1], dim=1)
    rows = rows.unsqueeze(-1).expand(-1, -1, law.token_BRC.shape[-1])
    kept = Tree(
        tree.token_BN.gather(1, order).masked_fill(~kept_BN, 0),
        parent_BN.masked_fill(~kept_BN, -1),
        tree.depth_BN.gather(1, order).masked_fill(~kept_BN, 0),
        tree.score_BN.gather(1, order).masked_fill(~kept_BN, float("-inf")),
        kept_BN.sum(dim=1),
    )
    return Drawn(kept, Law(law.token_BRC.gather(1, rows), law.logp_BRC.gather(1, rows)))
