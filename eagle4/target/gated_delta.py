"""Gated DeltaNet mixers (Qwen3-Next, Qwen3.5 dense and MoE, OLMo Hybrid) over packed rows.

They differ in how projections are fused and named; the rest is one computation: convolve q, k, v,
normalise q and k, gated delta rule, gated norm, output projection.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from ..cache import StateRows, StateShape, convolve, mix
from .attention import PackedState


class _Projected(NamedTuple):
    qkv: torch.Tensor  # [1, R, C]
    gate: torch.Tensor  # [1, R, H * V]
    beta: torch.Tensor  # [1, R, H] before the sigmoid
    decay: torch.Tensor  # [1, R, H] before softplus


def shape(mixer: Any) -> StateShape:
    """What the layer keeps of a sequence."""
    heads = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    return StateShape(mixer.conv_dim, mixer.conv_kernel_size, *heads)


def run(mixer: Any, hidden_1RH: torch.Tensor, state: PackedState) -> torch.Tensor:
    """The mixer's output ``[1, R, hidden]``."""
    given = _project(mixer, hidden_1RH)
    pool, step, layer = state.pool.recurrent, state.step, mixer.layer_idx
    assert pool is not None
    conv = mixer.conv1d
    qkv_RC = convolve(pool, layer, step, given.qkv[0], conv.weight.squeeze(1), conv.bias)
    qkv_RC = ACT2FN[mixer.activation](qkv_RC)
    widths = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
    query_RC, key_RC, value_RC = qkv_RC.split(widths, dim=-1)
    query_RGK = _unit(query_RC.unflatten(-1, (-1, mixer.head_k_dim))) * mixer.head_k_dim**-0.5
    beta_RH = given.beta[0].sigmoid()
    if getattr(mixer, "allow_neg_eigval", False):
        beta_RH = beta_RH * 2.0
    decay_RH = -mixer.A_log.float().exp() * functional.softplus(
        given.decay[0].float() + mixer.dt_bias
    )
    rows = StateRows(
        _unit(key_RC.unflatten(-1, (-1, mixer.head_k_dim))),
        value_RC.unflatten(-1, (-1, mixer.head_v_dim)),
        decay_RH,
        beta_RH,
    )
    out_RHV = mix(pool, layer, step, query_RGK, rows).to(hidden_1RH.dtype)
    norm, project = _ends(mixer)
    gate = given.gate.reshape(-1, mixer.head_v_dim)
    return project(norm(out_RHV.flatten(0, 1), gate).view(1, len(out_RHV), -1))


def _project(mixer: Any, hidden: torch.Tensor) -> _Projected:
    if hasattr(mixer, "in_proj_qkvz"):  # Qwen3-Next: one product, heads interleaved
        fused = mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
        *qkv, gate, beta, decay = mixer.fix_query_key_value_ordering(*fused)
        return _Projected(torch.cat([x.flatten(2) for x in qkv], -1), gate.flatten(2), beta, decay)
    if hasattr(mixer, "in_proj_qkv"):  # Qwen3.5
        linears = mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a
        return _Projected(*(linear(hidden) for linear in linears))
    qkv = torch.cat([linear(hidden) for linear in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], -1)
    return _Projected(qkv, mixer.g_proj(hidden), mixer.b_proj(hidden), mixer.a_proj(hidden))


def _ends(mixer: Any) -> tuple[Any, Any]:
    """Gated norm and output projection."""
    if hasattr(mixer, "o_proj"):
        return mixer.o_norm, mixer.o_proj
    return mixer.norm, mixer.out_proj


def _unit(rows_RGK: torch.Tensor) -> torch.Tensor:
    """Rows of length 1, in float32."""
    rows_RGK = rows_RGK.float()
    return rows_RGK * torch.rsqrt(rows_RGK.square().sum(dim=-1, keepdim=True) + 1e-6)
