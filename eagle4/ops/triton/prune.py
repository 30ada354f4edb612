"""Kernel of `ops.prune`: one program per sequence sorts the pool and orders what is kept.

With sets as words and N <= 64 everything behind the sort is a handful of N x N comparisons.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...types import Tree
from ..sizes import power_of_2
from .ancestors import ancestors_of, doublings, warps
from .candidate_head import ordered
from .launch import wrap_triton


@triton.jit
def _best_nodes(score, allowed, p, POOL: tl.constexpr, NODES: tl.constexpr):
    """Pool indices of the NODES best allowed nodes, best first, and which of them exist."""
    # Unique keys: descending score, then ascending index; real scores are above 0.
    key = (ordered(score).to(tl.int64) << 12) | (POOL - 1 - p).to(tl.int64)
    key = tl.sort(tl.where(allowed, key, 0), descending=True)
    rows = tl.reshape(key, [POOL // NODES, NODES])
    is_first = tl.arange(0, POOL // NODES)[:, None] == 0
    best = tl.sum(tl.where(is_first, rows, 0), 0)
    return (POOL - 1 - (best & 4095)).to(tl.int32), best > 0


@triton.jit
def _places(parent, kept, n, LEVELS: tl.constexpr):
    """Depth-first places of best-first nodes: how many nodes precede each."""
    word = ancestors_of(parent, n, LEVELS)
    above = ((word[:, None] >> n[None, :].to(tl.int64)) & 1) != 0
    above = above & kept[:, None] & kept[None, :]
    size = tl.sum(above.to(tl.int32), 0)  # descendants, itself included
    elder = (parent[:, None] == parent[None, :]) & (n[None, :] < n[:, None])
    before = tl.sum(tl.where(elder, size[None, :], 0), 1)
    place = tl.sum(tl.where(above, (before + 1)[None, :], 0), 1) - 1
    return tl.where(kept, place, n)


@triton.jit
def _prune_kernel(
    token_ptr, parent_ptr, depth_ptr, score_ptr, limit_ptr,
    token_out, parent_out, depth_out, score_out, count_out, capacity, nodes,
    POOL: tl.constexpr, NODES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    first = b * capacity
    limit = tl.load(limit_ptr + b)
    n = tl.arange(0, NODES)
    depth_ptr += first
    score_ptr += first
    p = tl.arange(0, POOL)
    depth = tl.load(depth_ptr + p, mask=p < capacity, other=0)
    score = tl.load(score_ptr + p, mask=p < capacity, other=float("-inf"))
    allowed = (depth >= 1) & (depth <= limit) & (score > float("-inf"))
    found = _best_nodes(score, allowed, p, POOL, NODES)
    origin, exists = found  # pyright: ignore[reportGeneralTypeIssues]
    kept = exists & (n < nodes)
    old_parent = tl.load(parent_ptr + first + origin, mask=kept, other=-1).to(tl.int32)
    is_parent = kept[None, :] & (old_parent[:, None] == origin[None, :])
    parent = tl.sum(tl.where(is_parent, (n + 1)[None, :], 0), 1) - 1
    place = _places(parent, kept, n, LEVELS)
    new_parent = tl.sum(tl.where(parent[:, None] == n[None, :], (place + 1)[None, :], 0), 1) - 1
    out = b * nodes + place
    fits = n < nodes
    token = tl.load(token_ptr + first + origin, mask=kept, other=0)
    depth = tl.load(depth_ptr + origin, mask=kept, other=0)
    score = tl.load(score_ptr + origin, mask=kept, other=float("-inf"))
    tl.store(token_out + out, token, mask=fits)
    tl.store(parent_out + out, new_parent.to(tl.int64), mask=fits)
    tl.store(depth_out + out, depth, mask=fits)
    tl.store(score_out + out, score, mask=fits)
    tl.store(count_out + b, tl.sum(kept.to(tl.int64), 0))


@torch.library.triton_op("eagle4::prune", mutates_args=())
def _prune(
    token_BN: torch.Tensor,
    parent_BN: torch.Tensor,
    depth_BN: torch.Tensor,
    score_BN: torch.Tensor,
    max_depth_B: torch.Tensor,
    max_nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, capacity = token_BN.shape
    nodes = min(max_nodes, capacity)
    size = max(power_of_2(nodes), 2)
    token, parent, depth = (token_BN.new_empty((batch, nodes)) for _ in range(3))
    score, count = score_BN.new_empty((batch, nodes)), token_BN.new_empty((batch,))
    wrap_triton(_prune_kernel)[(batch,)](
        token_BN, parent_BN, depth_BN, score_BN, max_depth_B,
        token, parent, depth, score, count, capacity, nodes,
        POOL=max(power_of_2(capacity), size), NODES=size, LEVELS=doublings(size),
        num_warps=warps(size),
    )  # fmt: skip
    return token, parent, depth, score, count


def prune(pool: Tree, max_nodes: int, max_depth_B: torch.Tensor) -> Tree:
    """As `ops.prune.prune`."""
    columns = (column.contiguous() for column in pool[:4])
    return Tree(*_prune(*columns, max_depth_B=max_depth_B.contiguous(), max_nodes=max_nodes))
