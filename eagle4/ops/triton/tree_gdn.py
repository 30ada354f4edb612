"""Kernel of `ops.tree_gdn`: one program per sequence, value head and block of value columns.

All rows of a tree fit into one tile. Decays on the way between two rows are summed row by row from
the ancestor bit masks, the triangular system is solved by forward substitution, everything else is
a product of tiles. float32 throughout, so the result differs from torch by rounding alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from ..tree_gdn import MOST_ROWS, TreePaths

_BLOCK_V = 32


@triton.jit
def _product(left, right):
    """float32 from three products of tensor cores."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _tree_gdn_kernel(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, state_ptr, slot_ptr, bits_ptr, out_ptr,
    rows, heads, groups, key_width, value_width,
    HAS_BETA: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    group = head // (heads // groups)
    i = tl.arange(0, ROWS)
    k = tl.arange(0, KEY)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row = i < rows
    is_key = is_row[:, None] & (k < key_width)[None, :]
    is_value = is_row[:, None] & (v < value_width)[None, :]
    key_at = ((b * rows + i)[:, None] * groups + group) * key_width + k[None, :]
    value_at = ((b * rows + i)[:, None] * heads + head) * value_width + v[None, :]
    query = tl.load(query_ptr + key_at, mask=is_key, other=0).to(tl.float32)
    key = tl.load(key_ptr + key_at, mask=is_key, other=0).to(tl.float32)
    value = tl.load(value_ptr + value_at, mask=is_value, other=0).to(tl.float32)
    slot = tl.load(slot_ptr + b)
    state = tl.load(
        state_ptr + ((slot * heads + head) * key_width + k[:, None]) * value_width + v[None, :],
        mask=(k < key_width)[:, None] & (v < value_width)[None, :], other=0,
    )  # fmt: skip
    bits = tl.load(bits_ptr + b * rows + i, mask=is_row, other=0)
    sees = ((bits[:, None] >> i[None, :].to(tl.int64)) & 1) == 1

    way = tl.zeros([ROWS, ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for row in range(rows):
        decay = tl.load(decay_ptr + (b * rows + row) * heads + head).to(tl.float32)
        decay = tl.maximum(decay, -1e4)
        is_above = ((bits >> row) & 1) == 1
        total += tl.where(is_above, decay, 0.0)
        way += tl.where(is_above[:, None] & ~is_above[None, :], decay, 0.0)
    pair = tl.where(sees, tl.exp(way), 0.0)
    total = tl.exp(total)[:, None]

    update = value
    if HAS_BETA:
        beta = tl.load(beta_ptr + (b * rows + i) * heads + head, mask=is_row, other=0)
        beta = beta.to(tl.float32)[:, None]
        update = beta * (value - total * _product(key, state))
        system = beta * _product(key, tl.trans(key)) * pair
        system = tl.where(i[:, None] > i[None, :], system, 0.0)
        for row in range(1, rows):
            line = tl.sum(tl.where(i[:, None] == row, system, 0.0), 0)
            known = tl.sum(line[:, None] * update, 0)
            update = tl.where(i[:, None] == row, update - known[None, :], update)
    seen = _product(query, tl.trans(key)) * pair
    out = total * _product(query, state) + _product(seen, update)
    tl.store(out_ptr + value_at, out, mask=is_value)


@triton_op("eagle4::tree_gdn", mutates_args=())
def _launch(
    query_BMGK: torch.Tensor,
    key_BMGK: torch.Tensor,
    value_BMHV: torch.Tensor,
    decay_BMH: torch.Tensor,
    beta_BMH: torch.Tensor | None,
    state_SHKV: torch.Tensor,
    slot_B: torch.Tensor,
    bits_BM: torch.Tensor,
) -> torch.Tensor:
    batch, rows, heads, width = value_BMHV.shape
    groups, key_width = key_BMGK.shape[2:]
    out_BMHV = torch.empty(value_BMHV.shape, dtype=torch.float32, device=value_BMHV.device)
    grid = (batch * heads, triton.cdiv(width, _BLOCK_V))
    wrap_triton(_tree_gdn_kernel)[grid](
        *(query_BMGK, key_BMGK, value_BMHV, decay_BMH),
        *(decay_BMH if beta_BMH is None else beta_BMH, state_SHKV, slot_B, bits_BM, out_BMHV),
        *(rows, heads, groups, key_width, width),
        HAS_BETA=beta_BMH is not None,
        ROWS=max(16, triton.next_power_of_2(rows)),
        KEY=max(16, triton.next_power_of_2(key_width)),
        BLOCK_V=_BLOCK_V,
    )
    return out_BMHV


def tree_gdn(
    query_BMGK: torch.Tensor,
    key_BMGK: torch.Tensor,
    value_BMHV: torch.Tensor,
    decay_BMH: torch.Tensor,
    beta_BMH: torch.Tensor | None,
    state_SHKV: torch.Tensor,
    paths: TreePaths,
    slot_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `ops.tree_gdn.tree_gdn`. Raises `ValueError` for more than `MOST_ROWS` rows."""
    batch, rows = value_BMHV.shape[:2]
    if rows > MOST_ROWS:
        raise ValueError(f"{rows} rows do not fit into one program; at most {MOST_ROWS} do")
    if slot_B is None:
        slot_B = torch.arange(batch, device=value_BMHV.device)
    beta_BMH = None if beta_BMH is None else beta_BMH.contiguous()
    return _launch(
        *(query_BMGK.contiguous(), key_BMGK.contiguous(), value_BMHV.contiguous()),
        *(decay_BMH.contiguous(), beta_BMH, state_SHKV.contiguous(), slot_B, paths.bits_BM),
    )
