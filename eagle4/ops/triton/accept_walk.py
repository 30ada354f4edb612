"""Kernel of `ops.accept_walk`: one program per tree, no loop: a node is accepted or it is not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...types import Tree, Verdict
from ..sizes import power_of_2
from .launch import wrap_triton


@triton.jit
def _walk_kernel(
    token_ptr, parent_ptr, depth_ptr, ancestor_ptr, choice_ptr, path_ptr, length_ptr, bonus_ptr,
    nodes, NODES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NODES)
    inside = n < nodes
    at = b * nodes + n
    choice_ptr += b * (nodes + 1)
    depth = tl.load(depth_ptr + at, mask=inside, other=0).to(tl.int32)
    own = tl.load(choice_ptr + 1 + n, mask=inside, other=-1)
    parent = tl.load(parent_ptr + at, mask=inside, other=-1)
    wanted = tl.load(choice_ptr + 1 + parent, mask=inside, other=-1)
    token = tl.load(token_ptr + at, mask=inside, other=-1)
    agrees = inside & (depth > 0) & (own >= 0) & (token == wanted)
    pair = inside[:, None] & inside[None, :]
    above_ptr = ancestor_ptr + b * nodes * nodes + n[:, None] * nodes + n[None, :]
    above = tl.load(above_ptr, mask=pair, other=0) != 0
    broken = tl.sum((above & (agrees == 0)[None, :]).to(tl.int32), 1)
    accepted = agrees & (broken == 0)
    length = tl.max(tl.where(accepted, depth, 0), 0)
    last = tl.min(tl.where(accepted & (depth == length), n, NODES), 0)
    row = tl.where(length > 0, last + 1, 0)
    tl.store(length_ptr + b, length.to(tl.int64))
    tl.store(bonus_ptr + b, tl.load(choice_ptr + row))
    # Row `last` of the matrix, along its columns; nothing where no node is accepted.
    on_path = tl.sum(tl.where((n == last)[:, None], above.to(tl.int32), 0), 0) > 0
    column = tl.where(on_path & accepted, depth - 1, NODES)
    index = tl.sum(tl.where(column[:, None] == n[None, :], (n + 1)[:, None], 0), 0) - 1
    tl.store(path_ptr + at, index.to(tl.int64), mask=inside)


@torch.library.triton_op("eagle4::accept_walk", mutates_args=())
def _accept_walk(
    token_BN: torch.Tensor,
    parent_BN: torch.Tensor,
    depth_BN: torch.Tensor,
    ancestors_BNN: torch.Tensor,
    choice_BR: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, nodes = token_BN.shape
    path_BS = torch.empty_like(token_BN)
    length_B, bonus_B = token_BN.new_empty((batch,)), token_BN.new_empty((batch,))
    wrap_triton(_walk_kernel)[(batch,)](
        token_BN, parent_BN, depth_BN, ancestors_BNN.view(torch.int8), choice_BR,
        path_BS, length_B, bonus_B, nodes, NODES=max(power_of_2(nodes), 2), num_warps=4,
    )  # fmt: skip
    return path_BS, length_B, bonus_B


def accept_walk(tree: Tree, ancestors_BNN: torch.Tensor, choice_BR: torch.Tensor) -> Verdict:
    """As `ops.accept_walk.accept_walk`; at least one node."""
    columns = (tree.token_BN, tree.parent_BN, tree.depth_BN, ancestors_BNN, choice_BR)
    return Verdict(*_accept_walk(*(column.contiguous() for column in columns)))
