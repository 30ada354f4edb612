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

from ..cache import AttentionStep, KVPool, LayerStep, attend, attend_layer

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
    groups: int  # query heads per key head
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
    eagle4_state: PackedState | LayerStep | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """``[1, heads, R, D]`` in, ``[1, R, heads, D]`` out, as the attention interface asks."""
    rows = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    options = {"scale": scaling, "softcap": softcap, "sinks_H": s_aux}
    if isinstance(eagle4_state, LayerStep):  # inside a compiled block
        out_RHD = attend_layer(eagle4_state, *rows, sliding_window=sliding_window, **options)
        return out_RHD.unsqueeze(0), None
    if eagle4_state is None:
        raise OutsideCallError
    layer: int = module.layer_idx  # type: ignore[assignment]
    if eagle4_state.calls is not None:
        unknown = frozenset(k for k, v in kwargs.items() if v is not None and v is not False)
        groups = query.shape[1] // key.shape[1]
        eagle4_state.calls[layer] = AttentionCall(sliding_window, groups, unknown)
    pool, step = eagle4_state.pool, eagle4_state.step
    out_RHD = attend(pool, layer, step, *rows, sliding_window=sliding_window, **options)
    return out_RHD.unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
