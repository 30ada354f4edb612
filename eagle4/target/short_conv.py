"""Short convolution mixers (LFM2 dense and MoE) over packed rows: gate, convolve, gate."""

from __future__ import annotations

from typing import Any

import torch

from ..cache import StateShape, convolve
from .attention import PackedState


def shape(mixer: Any) -> StateShape:
    """What the layer keeps of a sequence: its last inputs and no recurrent state."""
    return StateShape(mixer.conv.in_channels, mixer.conv_kernel_size)


def run(mixer: Any, hidden_1RH: torch.Tensor, state: PackedState) -> torch.Tensor:
    """The mixer's output ``[1, R, hidden]``."""
    pool, conv = state.pool.recurrent, mixer.conv
    assert pool is not None
    before, after, rows = mixer.in_proj(hidden_1RH)[0].chunk(3, dim=-1)
    weight_CW = conv.weight.squeeze(1)
    rows = convolve(pool, mixer.layer_idx, state.step, before * rows, weight_CW, conv.bias)
    return mixer.out_proj((after * rows).unsqueeze(0))
