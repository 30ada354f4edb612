"""Training-time test: the drafter unrolled over its own states, as serving will run it.

Slot t of a sequence is the row whose input token is x_{t+1} and whose state comes from the target's
features of position t. At depth k the slot reads x_{t+1+k} (teacher forced) and its own state of
depth k-1, sits at position t+1+k, and predicts x_{t+2+k}; its teacher is the target's last state at
t+1+k.

Only depth-0 keys are shared between slots, and they are pointwise in (features, token). So they are
computed for the whole context, while queries, MLP, head and loss run for anchors alone: a run of M
consecutive slots per sequence. Neighbouring anchors share teachers, so a run at K depths needs
M + K - 1 teacher rows.

Depth k, window W: slot t sees base keys s with t+k-W < s <= t and its own keys of depths i with
k-W < i <= k. This is what serving sees: absolute positions, the row itself included. EAGLE-3
section 3.2; the anchored form is TorchSpec's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..drafter.block import DraftBlock
from ..drafter.model import Eagle4Drafter
from .flex import Visible, attend_flex


class Runs(NamedTuple):
    """A batch of runs: B sequences, M anchors each, K depths, J = M + K - 1 teachers.

    Contexts are concatenated to N rows without padding.
    """

    feature_NTH: torch.Tensor  # taps of the context slots
    token_N: torch.Tensor  # int64, x_{t+1} of context slot t
    length_B: torch.Tensor  # int64, context slots of every sequence
    slot_BM: torch.Tensor  # int64, anchors, all below length_B
    token_BKM: torch.Tensor  # int64, x_{t+1+k}
    teacher_BJH: torch.Tensor  # last states y_{a+1+j} for the run's first anchor a
    valid_BKM: torch.Tensor  # bool, x_{t+2+k} and every prediction before it is supervised


def unroll(
    drafter: Eagle4Drafter,
    runs: Runs,
    recompute: bool = False,
    depths: Sequence[Callable] | None = None,
    flex: bool = False,
) -> torch.Tensor:
    """Head inputs ``[B, K, M, H]`` of every anchor at every depth.

    ``recompute``: keep no activations inside a depth, compute them again in the backward pass.
    ``depths``: compiled forms of `unroll_depth`, one for every depth. ``flex``: attend to the base
    keys by FlexAttention.
    """
    keep_BP = context_mask(runs.length_B)
    fused_NH = drafter.fuse(runs.feature_NTH)
    base = _context_keys(drafter, runs.token_N, fused_NH, keep_BP)
    state_BMH = _padded(fused_NH, keep_BP).gather(
        1, runs.slot_BM[..., None].expand(-1, -1, fused_NH.shape[-1])
    )
    heads, private = [], []
    for k in range(runs.token_BKM.shape[1]):
        step = unroll_depth if depths is None else depths[k]
        depth = partial(step, drafter, runs, k, base, keep_BP, flex)
        if recompute and torch.is_grad_enabled():
            head, state_BMH, *own = checkpoint(depth, state_BMH, *private, use_reentrant=False)
        else:
            head, state_BMH, *own = depth(state_BMH, *private)
        heads.append(head)
        # depth 0 keys are already among the base keys
        private += own if k else []
    return torch.stack(heads, dim=1)


def unroll_depth(
    drafter: Eagle4Drafter,
    runs: Runs,
    k: int,
    base: tuple[torch.Tensor, torch.Tensor],
    keep_BP: torch.Tensor,
    flex: bool,
    state_BMH: torch.Tensor,
    *private: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """One drafter step: head inputs, states, and the anchors' own keys and values.

    ``private``: keys and values of depths 1 to k - 1 in turn. A pure function, so that it can be
    computed twice.
    """
    window = drafter.config.sliding_window
    own: list[torch.Tensor] = []

    def attend(query, key, value):
        own.extend((key, value))
        keys, values = ([*private[i::2], own[i]] if k else [] for i in (0, 1))
        first = 0 if window is None else max(0, k - window)
        private_now = keys[first:], values[first:]
        if flex:
            visible = Visible(runs.slot_BM, runs.length_B, k, window)
            return attend_flex(query, *base, visible, *private_now)
        return attend_private(
            query, *base, base_mask(runs.slot_BM, keep_BP, k, window), *private_now
        )

    out = drafter(state_BMH, runs.token_BKM[:, k], runs.slot_BM + 1 + k, attend)
    return out.head_RH, out.state_RH, *own


def context_mask(length_B: torch.Tensor) -> torch.Tensor:
    """``[B, P]``: which padded columns hold a context slot."""
    return torch.arange(int(length_B.max()), device=length_B.device) < length_B[:, None]


def base_mask(
    slot_BM: torch.Tensor, keep_BP: torch.Tensor, k: int, window: int | None
) -> torch.Tensor:
    """``[B, M, P]``: base keys that every anchor sees at depth k."""
    s_P = torch.arange(keep_BP.shape[1], device=slot_BM.device)
    seen_BMP = (s_P <= slot_BM[..., None]) & keep_BP[:, None]
    if window is not None:
        seen_BMP &= s_P > slot_BM[..., None] + (k - window)
    return seen_BMP


def attend_private(
    query_BMAD: torch.Tensor,
    key_BPGD: torch.Tensor,
    value_BPGD: torch.Tensor,
    mask_BMP: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """Softmax over the shared base keys under a mask and each anchor's private keys.

    ``keys``, ``values``: one ``[B, M, G, D]`` per earlier depth in the window, this depth included.
    A heads are split into G groups (grouped-query attention).
    """
    groups, width = key_BPGD.shape[-2:]
    query = query_BMAD.unflatten(-2, (groups, -1)) * width**-0.5
    base = torch.einsum("bmgad,bpgd->bgamp", query, key_BPGD)
    # added, not filled: a sum needs no work in the backward pass
    bias_BMP = torch.zeros_like(mask_BMP, dtype=base.dtype).masked_fill_(~mask_BMP, float("-inf"))
    scores = [base + bias_BMP[:, None, None]]
    if keys:
        private_BIMGD = torch.stack(keys, dim=1)
        scores.append(torch.einsum("bmgad,bimgd->bgami", query, private_BIMGD))
    # in the scores' precision, float32 inside: what the next product would round it to
    weight = F.softmax(torch.cat(scores, dim=-1), dim=-1)
    num_base = key_BPGD.shape[1]
    out = torch.einsum("bgamp,bpgd->bmgad", weight[..., :num_base], value_BPGD)
    if keys:
        value_BIMGD = torch.stack(values, dim=1)
        out = out + torch.einsum("bgami,bimgd->bmgad", weight[..., num_base:], value_BIMGD)
    return out.flatten(-3, -2)


def _context_keys(
    drafter: Eagle4Drafter, token_N: torch.Tensor, fused_NH: torch.Tensor, keep_BP: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    block = cast(DraftBlock, drafter.layers[0])
    embed_NH = drafter.embed(token_N).to(fused_NH.dtype)
    _, hidden = block.attention_input(fused_NH, embed_NH)
    position_N = torch.arange(keep_BP.shape[1], device=token_N.device).expand_as(keep_BP)[keep_BP]
    key, value = block.self_attn.keys(hidden, drafter.rotary(hidden, position_N + 1))
    return _padded(key, keep_BP), _padded(value, keep_BP)


def _padded(rows: torch.Tensor, keep_BP: torch.Tensor) -> torch.Tensor:
    """Concatenated rows ``[N, ...]`` to ``[B, P, ...]``; padding repeats some row, masked later."""
    index = (keep_BP.flatten().cumsum(0) - 1).clamp_min(0)
    return rows.index_select(0, index).view(*keep_BP.shape, *rows.shape[1:])
