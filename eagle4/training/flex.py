"""Attention of anchors over base keys by FlexAttention: blocks of hidden slots are not computed and
no score is kept for the backward pass, which is what long contexts need.

The mask is a function of indices; private keys, a few per anchor, are scored beside it and merged
by the log-sum-exp of both parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention


class Visible(NamedTuple):
    """Which base keys the anchors of a batch see at one depth."""

    slot_BM: torch.Tensor
    length_B: torch.Tensor
    depth: int
    window: int | None

    def function(self) -> Callable[..., torch.Tensor]:
        """Of (sequence, head, anchor, base slot), as FlexAttention asks."""
        slot_BM, length_B, depth, window = self

        def sees(b, h, m, p):
            slot = slot_BM[b, m]
            seen = (p <= slot) & (p < length_B[b])
            return seen if window is None else seen & (p > slot + (depth - window))

        return sees


def attend_flex(
    query_BMAD: torch.Tensor,
    key_BPGD: torch.Tensor,
    value_BPGD: torch.Tensor,
    visible: Visible,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """`ttt.attend_private` with a mask that is a function."""
    is_blind = visible.window is not None and visible.depth >= visible.window
    base = None if is_blind else _base(query_BMAD, key_BPGD, value_BPGD, visible)
    if not keys:
        assert base is not None, "an anchor sees itself"
        return base[0]
    groups, width = key_BPGD.shape[-2:]
    asked = query_BMAD.unflatten(-2, (groups, -1)) * width**-0.5
    score = torch.einsum("bmgad,bimgd->bmgai", asked, torch.stack(keys, dim=1)).float()
    score_BMAI = score.flatten(2, 3)
    total_BMA = score_BMAI.logsumexp(dim=-1)
    if base is not None:
        total_BMA = torch.logaddexp(base[1], total_BMA)
    weight = (score_BMAI - total_BMA[..., None]).exp().unflatten(2, (groups, -1))
    stacked = torch.stack(values, dim=1)
    own = torch.einsum("bmgai,bimgd->bmgad", weight.to(stacked.dtype), stacked).flatten(2, 3)
    if base is None:
        return own
    out_BMAD, lse_BMA = base
    return own + out_BMAD * (lse_BMA - total_BMA).exp().unsqueeze(-1).to(out_BMAD.dtype)


def _base(
    query_BMAD: torch.Tensor, key_BPGD: torch.Tensor, value_BPGD: torch.Tensor, visible: Visible
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over base keys alone and its float32 log-sum-exp ``[B, M, A]``."""
    # Under autocast values are low precision and rotated queries and keys may be float32.
    parts = (x.to(value_BPGD.dtype) for x in (query_BMAD, key_BPGD, value_BPGD))
    query, key, value = (x.transpose(1, 2) for x in parts)
    sizes: tuple[Any, ...] = (len(query), None, query.shape[2], key.shape[2])
    mask = create_block_mask(visible.function(), *sizes, device=str(query.device))
    setting: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    found: Any = flex_attention(query, key, value, block_mask=mask, **setting)
    return found[0].transpose(1, 2), found[1].lse.transpose(1, 2).float()
