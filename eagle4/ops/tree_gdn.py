"""The gated delta rule over a tree of rows: every row continues its parent's state.

    S_i = a_i S_p + k_i u_i^T        a_i = exp(decay_i), p the parent of i; a root's parent is S_0
    u_i = beta_i (v_i - a_i S_p^T k_i)
    o_i = S_i^T q_i

Without beta, u_i = v_i: gated linear attention, which is what Mamba-2 computes (q = C, k = B,
v = dt x, decay = dt A). `tree_gdn_reference` says this row by row. `tree_gdn` is the closed form,
the chunked delta rule (Gated DeltaNet, arXiv 2412.06464) with the ancestor mask A in place of the
causal mask: with D_ij = A_ij exp(decays on the way from j to i) and G_i = exp(decays from S_0 to i)

    (I + strict(beta_i D_ij k_i.k_j)) u = beta (v - G k S_0)         one small triangular solve
    o = G q S_0 + (D * q k^T) u

Decays are summed along the way itself, never subtracted from each other: all terms have one sign,
so a gate near 0 costs its neighbours no precision. G and K query/key heads serve H value heads.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

CHUNK = 64  # rows of a chain that are solved at once
MOST_ROWS = 64  # rows of a tree: ancestor sets are 64-bit masks in the kernel
_LEAST_DECAY = -1e4  # exp of it is 0; -inf would turn the sums of others into NaN


class TreePaths:
    """Ancestry of rows, parents before children, in the forms that all layers share.

    ``ancestors_BMM``: bool, (i, j) is True when j is i or an ancestor of i.
    """

    def __init__(self, ancestors_BMM: torch.Tensor):
        self.ancestors_BMM = ancestors_BMM

    @cached_property
    def between_BPM(self) -> torch.Tensor:
        """float32, (i * M + j, l): 1 where row l lies on the way from j to i."""
        ancestors = self.ancestors_BMM
        above = ancestors.unsqueeze(2) & ~ancestors.unsqueeze(1)
        return (above & ancestors.unsqueeze(3)).flatten(1, 2).float()

    @cached_property
    def bits_BM(self) -> torch.Tensor:
        """int64: bit j of row i is (i, j)."""
        row_M = torch.arange(self.ancestors_BMM.shape[1], device=self.ancestors_BMM.device)
        return (self.ancestors_BMM.long() << row_M).sum(dim=2)


def tree_gdn(
    query_BMGK: torch.Tensor,
    key_BMGK: torch.Tensor,
    value_BMHV: torch.Tensor,
    decay_BMH: torch.Tensor,
    beta_BMH: torch.Tensor | None,
    state_SHKV: torch.Tensor,
    paths: TreePaths,
    slot_B: torch.Tensor | None = None,
    impl: str = "torch",
) -> torch.Tensor:
    """Outputs of all rows, float32 ``[B, M, H, V]``; the state is only read.

    ``decay_BMH`` are logarithms, at most 0. ``slot_B``: rows of ``state_SHKV`` (None: the first
    B). ``impl="triton"`` runs the kernel, for at most `MOST_ROWS` rows. Computed in float32.
    """
    if impl == "triton":
        from .triton.tree_gdn import tree_gdn as kernel

        inputs = query_BMGK, key_BMGK, value_BMHV, decay_BMH, beta_BMH
        return kernel(*inputs, state_SHKV, paths, slot_B)
    rows, heads = value_BMHV.shape[1:3]
    state_BHKV = state_SHKV[: len(value_BMHV)] if slot_B is None else state_SHKV[slot_B]
    key_BHMK, query_BHMK = _heads_first(key_BMGK, heads), _heads_first(query_BMGK, heads)
    decays = _tree_decays(decay_BMH, paths)
    # One product reads the state once for both.
    both_BHMV = torch.cat([key_BHMK, query_BHMK], dim=2) @ state_BHKV
    update_BHMV = _updates(key_BHMK, value_BMHV, beta_BMH, decays, both_BHMV[:, :, :rows])
    return _outputs(query_BHMK, key_BHMK, update_BHMV, decays, both_BHMV[:, :, rows:])


def advance_gdn_(
    state_BHKV: torch.Tensor,
    key_BMGK: torch.Tensor,
    value_BMHV: torch.Tensor,
    decay_BMH: torch.Tensor,
    beta_BMH: torch.Tensor | None,
    query_BMGK: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Run a chain of rows into the contiguous float32 state, in place; the outputs when asked.

    A row with decay 0, value 0 and beta 0 changes nothing.
    """
    outputs = []
    for first in range(0, value_BMHV.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        beta = None if beta_BMH is None else beta_BMH[:, part]
        query = None if query_BMGK is None else query_BMGK[:, part]
        rows = key_BMGK[:, part], value_BMHV[:, part], decay_BMH[:, part]
        outputs.append(_advance_chunk_(state_BHKV, *rows, beta, query))
    return None if query_BMGK is None else torch.cat(outputs, dim=1)


def tree_gdn_reference(
    query_BMGK: torch.Tensor,
    key_BMGK: torch.Tensor,
    value_BMHV: torch.Tensor,
    decay_BMH: torch.Tensor,
    beta_BMH: torch.Tensor | None,
    state_BHKV: torch.Tensor,
    parent_BM: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification: outputs ``[B, M, H, V]`` and states ``[B, M, H, K, V]`` of all rows.

    ``parent_BM``: an earlier row, or -1 for the committed state. In the state's precision.
    """
    batch, rows, heads, _ = value_BMHV.shape
    dtype = state_BHKV.dtype
    query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query_BMGK, key_BMGK))
    states = state_BHKV.new_empty(batch, rows, *state_BHKV.shape[1:])
    outputs = state_BHKV.new_empty(value_BMHV.shape)
    for b in range(batch):
        for row in range(rows):
            parent = int(parent_BM[b, row])
            before_HKV = state_BHKV[b] if parent < 0 else states[b, parent]
            decayed_HKV = before_HKV * decay_BMH[b, row].to(dtype).exp()[:, None, None]
            key_HK, update_HV = key[b, row].to(dtype), value_BMHV[b, row].to(dtype)
            if beta_BMH is not None:
                known_HV = (key_HK[:, None] @ decayed_HKV)[:, 0]
                update_HV = (update_HV - known_HV) * beta_BMH[b, row].to(dtype)[:, None]
            states[b, row] = decayed_HKV + key_HK[:, :, None] * update_HV[:, None]
            outputs[b, row] = (query[b, row].to(dtype)[:, None] @ states[b, row])[:, 0]
    return outputs, states


class _Decays(NamedTuple):
    pair_BHMM: torch.Tensor  # D
    total_BHM1: torch.Tensor  # G


def _tree_decays(decay_BMH: torch.Tensor, paths: TreePaths) -> _Decays:
    batch, rows, heads = decay_BMH.shape
    decay_BMH = decay_BMH.float().clamp_min(_LEAST_DECAY)
    way_BPH = paths.between_BPM @ decay_BMH
    way_BHMM = way_BPH.view(batch, rows, rows, heads).permute(0, 3, 1, 2)
    pair_BHMM = way_BHMM.exp() * paths.ancestors_BMM.unsqueeze(1)
    total_BMH = (paths.ancestors_BMM.float() @ decay_BMH).exp()
    return _Decays(pair_BHMM, total_BMH.transpose(1, 2).unsqueeze(-1))


def _chain_decays(decay_BMH: torch.Tensor) -> _Decays:
    """The same for a chain, by running sums down the columns."""
    decay_BHM = decay_BMH.float().clamp_min(_LEAST_DECAY).transpose(1, 2)
    rows = decay_BHM.shape[2]
    below = torch.ones(rows, rows, dtype=torch.bool, device=decay_BHM.device).tril(-1)
    way_BHMM = (decay_BHM.unsqueeze(-1) * below).cumsum(dim=2)
    return _Decays(way_BHMM.exp().tril(), decay_BHM.cumsum(dim=2).exp().unsqueeze(-1))


def _heads_first(rows_BMGK: torch.Tensor, heads: int) -> torch.Tensor:
    """float32 ``[B, H, M, K]``, every key head repeated for its value heads."""
    rows_BGMK = rows_BMGK.float().transpose(1, 2)
    groups = rows_BGMK.shape[1]
    return rows_BGMK if groups == heads else rows_BGMK.repeat_interleave(heads // groups, dim=1)


def _updates(
    key_BHMK: torch.Tensor,
    value_BMHV: torch.Tensor,
    beta_BMH: torch.Tensor | None,
    decays: _Decays,
    known_BHMV: torch.Tensor,
) -> torch.Tensor:
    """u of all rows; ``known_BHMV`` is what the keys read from S_0."""
    value_BHMV = value_BMHV.float().transpose(1, 2)
    if beta_BMH is None:
        return value_BHMV
    beta_BHM1 = beta_BMH.float().transpose(1, 2).unsqueeze(-1)
    # The solver takes the diagonal for 1 and does not look above it.
    system_BHMM = beta_BHM1 * (key_BHMK @ key_BHMK.mT) * decays.pair_BHMM
    wanted_BHMV = beta_BHM1 * (value_BHMV - decays.total_BHM1 * known_BHMV)
    return torch.linalg.solve_triangular(system_BHMM, wanted_BHMV, upper=False, unitriangular=True)


def _outputs(
    query_BHMK: torch.Tensor,
    key_BHMK: torch.Tensor,
    update_BHMV: torch.Tensor,
    decays: _Decays,
    known_BHMV: torch.Tensor,
) -> torch.Tensor:
    seen_BHMM = (query_BHMK @ key_BHMK.mT) * decays.pair_BHMM
    return (decays.total_BHM1 * known_BHMV + seen_BHMM @ update_BHMV).transpose(1, 2)


def _advance_chunk_(
    state_BHKV: torch.Tensor,
    key_BMGK: torch.Tensor,
    value_BMHV: torch.Tensor,
    decay_BMH: torch.Tensor,
    beta_BMH: torch.Tensor | None,
    query_BMGK: torch.Tensor | None,
) -> torch.Tensor | None:
    heads = value_BMHV.shape[2]
    key_BHMK = _heads_first(key_BMGK, heads)
    decays = _chain_decays(decay_BMH)
    update_BHMV = _updates(key_BHMK, value_BMHV, beta_BMH, decays, key_BHMK @ state_BHKV)
    out_BMHV = None
    if query_BMGK is not None:
        query_BHMK = _heads_first(query_BMGK, heads)
        known_BHMV = query_BHMK @ state_BHKV
        out_BMHV = _outputs(query_BHMK, key_BHMK, update_BHMV, decays, known_BHMV)
    weighted_BHMK = key_BHMK * decays.pair_BHMM[:, :, -1].unsqueeze(-1)
    state_BHKV.mul_(decays.total_BHM1[:, :, -1:])
    state_BHKV.view(-1, *state_BHKV.shape[2:]).baddbmm_(
        weighted_BHMK.flatten(0, 1).mT, update_BHMV.flatten(0, 1)
    )
    return out_BMHV
