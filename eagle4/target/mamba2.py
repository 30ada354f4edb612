"""Mamba-2 mixers of hybrids (Bamba, Falcon-H1, Granite 4, Nemotron-H) over packed rows.

State space duality: gated linear attention with q = C, k = B, v = dt x and decay = dt A, plus the
skip D x. Falcon-H1 scales its projections and may gate without a norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from ..cache import StateRows, StateShape, convolve, mix
from .attention import PackedState


def shape(mixer: Any) -> StateShape:
    """What the layer keeps of a sequence."""
    heads = mixer.num_heads, mixer.ssm_state_size, mixer.head_dim
    return StateShape(mixer.conv_dim, mixer.conv_kernel_size, *heads)


def run(mixer: Any, hidden_1RH: torch.Tensor, state: PackedState) -> torch.Tensor:
    """The mixer's output ``[1, R, hidden]``."""
    pool, step, layer = state.pool.recurrent, state.step, mixer.layer_idx
    assert pool is not None
    sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
    gate, xbc, dt_1RH = _project(mixer, hidden_1RH).split(sizes, dim=-1)
    conv = mixer.conv1d
    xbc_RC = convolve(pool, layer, step, xbc[0], conv.weight.squeeze(1), conv.bias)
    xbc_RC = ACT2FN[mixer.activation](xbc_RC)
    groups = mixer.n_groups * mixer.ssm_state_size
    x_RC, b_RC, c_RC = xbc_RC.split([mixer.intermediate_size, groups, groups], dim=-1)
    x_RHV = x_RC.unflatten(-1, (mixer.num_heads, mixer.head_dim)).float()
    key_RGK, query_RGK = (x.unflatten(-1, (mixer.n_groups, -1)).float() for x in (b_RC, c_RC))
    dt_RH = _time_step(mixer, dt_1RH[0], state)
    decay_RH = -mixer.A_log.float().exp() * dt_RH
    rows = StateRows(key_RGK, x_RHV * dt_RH.unsqueeze(-1), decay_RH, None)
    out_RHV = mix(pool, layer, step, query_RGK, rows) + mixer.D.unsqueeze(-1) * x_RHV
    out_1RC = out_RHV.flatten(1).unsqueeze(0)
    if getattr(mixer, "mamba_rms_norm", True):
        out_1RC = mixer.norm(out_1RC, gate)
    else:
        out_1RC = out_1RC * functional.silu(gate)
    return mixer.out_proj(out_1RC.to(hidden_1RH.dtype))


def _project(mixer: Any, hidden_1RH: torch.Tensor) -> torch.Tensor:
    if not hasattr(mixer, "mup_vector"):
        return mixer.in_proj(hidden_1RH)
    return mixer.in_proj(hidden_1RH * mixer.ssm_in_multiplier) * mixer.mup_vector


def _time_step(mixer: Any, dt_RH: torch.Tensor, state: PackedState) -> torch.Tensor:
    """Limited for prompts only: so do Transformers and the kernels of mamba-ssm."""
    dt_RH = functional.softplus(dt_RH + mixer.dt_bias.to(dt_RH.dtype)).float()
    lineage = state.step.lineage
    is_prompt = lineage is not None and lineage.is_prompt
    return dt_RH.clamp(*mixer.time_step_limit) if is_prompt else dt_RH
