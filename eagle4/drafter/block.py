"""The drafter's single decoder layer, in its EAGLE-4 and its EAGLE-3 form.

EAGLE-4:  u = eh_proj([norm_e(embed); norm_h(g)]),  x = u + attn(attn_norm(u))
EAGLE-3:  x = g + attn([norm_e(embed); norm_h(g)])            (q/k/v read 2H)
both:     out = x + mlp(norm(x)), and with experts (see `moe`) out + experts(moe_norm(out))

Attention itself is a function argument: serving reads a paged pool, training reads the
training-time-test layout, and the weights do not know the difference. Where `sharded` has split the
attention or the MLP, the output projection's sum over ranks, the residual and the norm that follows
are one step (`add_norm`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ..config import Eagle4Config
from ..ops import normed_linear, small_linear
from ..parallel.linear import Summed
from .moe import DraftExperts

# (query [..., Hq, D], key [..., Hkv, D], value [..., Hkv, D]) -> [..., Hq, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor] | None


def add_norm(
    rows: torch.Tensor, linear: nn.Module, residual: torch.Tensor, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + linear(rows)`` and its norm: both ``[..., H]``."""
    if isinstance(linear, Summed):
        return linear.add_norm(rows, residual, norm)
    hidden = residual + small_linear(rows, linear)  # type: ignore[arg-type]
    return hidden, norm(hidden)


class DraftRotaryEmbedding(LlamaRotaryEmbedding):
    """Inverse frequencies that stay exact and float32 whatever the drafter is cast or moved to.

    In bf16 a frequency is wrong by up to 1 part in 256, which at position 1,000 is a wrong angle.
    They are computed on the CPU even under a meta-device context, because no file stores them.
    Transformers recognises rotary modules, to fill them again after loading, by this class name.
    """

    def __init__(self, config: Eagle4Config):
        with torch.device("cpu"):
            super().__init__(config)  # pyright: ignore[reportArgumentType]
        self._exact = self.original_inv_freq.clone()

    def _apply(self, fn: Callable, recurse: bool = True) -> DraftRotaryEmbedding:
        super()._apply(fn, recurse)
        device = self.original_inv_freq.device
        self.inv_freq = self._exact.to(device)
        self.original_inv_freq = self._exact.to(device)
        return self


class DraftAttention(nn.Module):
    """Projections and rotary embedding around an injected attention function."""

    def __init__(self, config: Eagle4Config):
        super().__init__()
        width_in = config.hidden_size if config.eh_proj else 2 * config.hidden_size
        bias, head_dim = config.attention_bias, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width_in, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width_in, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width_in, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(
            config.num_attention_heads * head_dim, config.hidden_size, bias=bias
        )

    def forward(self, hidden: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        """Input of ``o_proj``: ``[..., Hq * D]``."""
        query, key, value = self.project(hidden, rotary)
        return attend(query, key, value).flatten(-2)

    def project(
        self, hidden: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated query and key, and value: ``[..., heads, D]``."""
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (self._heads(hidden, projection) for projection in projections)
        if rotary is not None:
            query, key = apply_rotary_pos_emb(query, key, *rotary, unsqueeze_dim=-2)
        return query, key, value

    def keys(self, hidden: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated key and value ``[..., heads, D]`` of rows that ask nothing."""
        key, value = self._heads(hidden, self.k_proj), self._heads(hidden, self.v_proj)
        if rotary is not None:
            key = apply_rotary_pos_emb(key[..., :0, :], key, *rotary, unsqueeze_dim=-2)[1]
        return key, value

    def _heads(self, hidden: torch.Tensor, projection: nn.Linear) -> torch.Tensor:
        return small_linear(hidden, projection).unflatten(-1, (-1, self.head_dim))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Eagle4Config):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input of ``down_proj``: ``[..., I]``."""
        gate, up = small_linear(hidden, self.gate_proj), small_linear(hidden, self.up_proj)
        return self.act(gate) * up


class DraftBlock(nn.Module):
    """One decoder layer over (embedding, state) pairs."""

    def __init__(self, config: Eagle4Config):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False) if config.eh_proj else None
        self.attn_norm = LlamaRMSNorm(hidden, eps) if config.eh_proj and config.attn_norm else None
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self.mlp = DraftMLP(config)
        self.moe = DraftExperts(config) if config.num_experts else None
        has_moe_norm = config.num_experts and config.moe_norm
        self.moe_norm = LlamaRMSNorm(hidden, eps) if has_moe_norm else None

    def attention_input(
        self, state: torch.Tensor, embed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, input of q/k/v)."""
        parts, norms = (embed, state), (self.input_layernorm, self.hidden_norm)
        if self.eh_proj is None:
            normed = [norm(part) for norm, part in zip(norms, parts, strict=True)]
            return state, torch.cat(normed, dim=-1)
        residual = normed_linear(parts, norms, self.eh_proj)
        return residual, residual if self.attn_norm is None else self.attn_norm(residual)

    def forward(
        self,
        state: torch.Tensor,
        embed: torch.Tensor,
        rotary: Rotary,
        attend: Attend,
        last_norm: nn.Module,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and its ``last_norm``: both ``[..., H]``."""
        residual, attention_input = self.attention_input(state, embed)
        attended = self.self_attn(attention_input, rotary, attend)
        norm = self.post_attention_layernorm
        hidden, normed = add_norm(attended, self.self_attn.o_proj, residual, norm)
        inner, down = self.mlp(normed), self.mlp.down_proj
        if self.moe is None:
            return add_norm(inner, down, hidden, last_norm)
        if self.moe_norm is None:
            out = hidden + small_linear(inner, down)
        else:
            out, normed = add_norm(inner, down, hidden, self.moe_norm)
        out = out + self.moe(normed)
        return out, last_norm(out)
