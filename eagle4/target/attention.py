"""The attention function that Transformers calls inside a packed forward.

Transformers hands every layer's projected, rotated q/k/v to a registered function together with the
layer's own ``sliding_window``, scaling, soft cap and sinks. Ours stores K/V in the paged pool and
attends over what each row may see. The step's state arrives as one keyword argument of the model's
`forward`; nothing is hidden in globals.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..cache import AttentionStep, KVPool, attend

NAME = "eagle4"
KEYWORD = "eagle4_state"


class OutsideCallError(RuntimeError):
    """A layer ran in its packed form without the state of a packed forward."""

    def __init__(self):
        super().__init__(
            "the target was called from outside while eagle4 is generating with it; "
            "use a second copy of the model for concurrent calls"
        )


class AttentionCall(NamedTuple):
    """What one layer's attention call carried beside q, k and v."""

    sliding_window: int | None
    unknown: frozenset[str]  # names of arguments that were given and not used


class PackedState(NamedTuple):
    """What one packed forward passes down to every attention and recurrent layer."""

    step: AttentionStep
    pool: KVPool
    calls: dict[int, AttentionCall] | None = None  # by layer, filled when given: for the probe


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    eagle4_state: PackedState | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """``[1, heads, R, D]`` in, ``[1, R, heads, D]`` out, as the attention interface asks."""
    if eagle4_state is None:
        raise OutsideCallError
    if eagle4_state.calls is not None:
        unknown = frozenset(k for k, v in kwargs.items() if v is not None and v is not False)
        eagle4_state.calls[module.layer_idx] = AttentionCall(sliding_window, unknown)  # type: ignore[index]
    out_RHD = attend(
        eagle4_state.pool,
        module.layer_idx,  # type: ignore[arg-type]
        eagle4_state.step,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        sliding_window=sliding_window,
        scale=scaling,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out_RHD.unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
