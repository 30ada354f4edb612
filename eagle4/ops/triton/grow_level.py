"""Kernel of `ops.grow_level`: one program per sequence scores, writes and sorts a level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...types import Candidates, Tree
from ..sizes import power_of_2
from .candidate_head import ordered
from .launch import wrap_triton


@triton.jit
def _grow_kernel(
    token_ptr, parent_ptr, depth_ptr, score_ptr, count_ptr, frontier_ptr, child_ptr, logp_ptr,
    order_ptr, capacity, width, per_node, kept,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < width * per_node
    parent = tl.load(frontier_ptr + b * width + c // per_node, mask=inside, other=0)
    token = tl.load(child_ptr + b * width * per_node + c, mask=inside, other=0)
    logp = tl.load(logp_ptr + b * width * per_node + c, mask=inside, other=0.0)
    # Not a minimum: NaN has to stay NaN.
    logp = tl.where(logp > 0, 0.0, logp)
    score = tl.load(score_ptr + b * capacity + parent, mask=inside, other=0.0) + logp
    place = b * capacity + tl.load(count_ptr + b) + c
    tl.store(token_ptr + place, token, mask=inside)
    tl.store(parent_ptr + place, parent, mask=inside)
    depth = tl.load(depth_ptr + b * capacity + parent, mask=inside, other=0) + 1
    tl.store(depth_ptr + place, depth, mask=inside)
    tl.store(score_ptr + place, score, mask=inside)
    # Unique keys: descending score, then ascending index. Padding is below every real one.
    key = (ordered(score).to(tl.int64) << 12) | (BLOCK - 1 - c).to(tl.int64)
    key = tl.sort(tl.where(inside, key, -1), descending=True)
    index = BLOCK - 1 - (key & 4095)
    tl.store(order_ptr + b * kept + c, index, mask=c < kept)


@torch.library.triton_op(
    "eagle4::grow_level", mutates_args={"token_BN", "parent_BN", "depth_BN", "score_BN"}
)
def _grow_level(
    token_BN: torch.Tensor,
    parent_BN: torch.Tensor,
    depth_BN: torch.Tensor,
    score_BN: torch.Tensor,
    count_B: torch.Tensor,
    frontier_BK: torch.Tensor,
    child_BC: torch.Tensor,
    logp_BC: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    (batch, width), children = frontier_BK.shape, child_BC.shape[1]
    order = frontier_BK.new_empty((batch, min(top_k, children)))
    wrap_triton(_grow_kernel)[(batch,)](
        token_BN, parent_BN, depth_BN, score_BN, count_B, frontier_BK, child_BC, logp_BC, order,
        token_BN.shape[1], width, children // width, order.shape[1],
        BLOCK=max(power_of_2(children), 2), num_warps=4,
    )  # fmt: skip
    return order


def grow_level(
    pool: Tree, frontier_BK: torch.Tensor, candidates: Candidates, top_k: int
) -> torch.Tensor:
    """As `ops.grow_level.grow_level`; the pool's columns must be contiguous."""
    batch = len(frontier_BK)
    assert all(column.is_contiguous() for column in pool)
    return _grow_level(
        *pool,
        frontier_BK.contiguous(),
        candidates.token_RK.reshape(batch, -1).contiguous(),
        candidates.logp_RK.reshape(batch, -1).contiguous(),
        top_k,
    )
