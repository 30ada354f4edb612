"""Routed experts beside the drafter's dense MLP.

Routing as DeepSeek-V3 does it: scores are sigmoids of float32 logits; the ``num_experts_per_tok``
experts with the largest ``score + bias`` are chosen; their weights are the scores without the bias,
normalised (``norm_topk_prob``) and scaled. The bias is no parameter: after every optimiser step it
moves against the load (`balance`), which balances experts without a gradient that disturbs them.

The dense MLP stays as the shared expert. With ``moe_norm`` the experts read the normalised output
of the dense layer, ``h' = h + mlp(norm(h))``, ``out = h' + experts(moe_norm(h'))``; without it
both read the same input. The experts' output projection starts at zero, so a MoE drafter begins as
its dense part. Rows are sorted by expert and multiplied in one grouped product, whose group ends
stay on the device.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ..config import Eagle4Config

_STD = 0.02


class Router(nn.Module):
    """Chooses experts and their weights; counts its choices while gradients are recorded."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: Eagle4Config):
        super().__init__()
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.is_normalised = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=_STD)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.loads: list[torch.Tensor] = []  # choices of every expert, by forward
        self.balance_terms: list[torch.Tensor] = []  # mean router probabilities, with gradient

    def forward(self, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen experts and weights, ``[R, top_k]``."""
        with torch.autocast(hidden_RH.device.type, enabled=False):
            logits_RE = hidden_RH.float() @ self.weight.float().T
        score_RE = logits_RE.sigmoid()
        expert_RK = (score_RE + self.e_score_correction_bias.float()).topk(self.top_k).indices
        weight_RK = score_RE.gather(1, expert_RK)
        if self.is_normalised:
            weight_RK = weight_RK / (weight_RK.sum(-1, keepdim=True) + 1e-20)
        if torch.is_grad_enabled():
            self.loads.append(choices(expert_RK, len(self.weight)))
            self.balance_terms.append(logits_RE.softmax(-1).mean(0))
        return expert_RK, weight_RK * self.scale

    def take_load(self) -> torch.Tensor:
        """Choices of every expert since the last call."""
        zeros = torch.zeros(1, len(self.weight), device=self.weight.device)
        load_E = torch.cat([zeros, *(load[None] for load in self.loads)]).sum(0)
        self.loads.clear()
        self.balance_terms.clear()
        return load_E

    @torch.no_grad()
    def balance(self, load_E: torch.Tensor, rate: float) -> None:
        """Move the bias of every expert by ``rate`` towards the mean load."""
        self.e_score_correction_bias += rate * torch.sign(load_E.mean() - load_E)


class Experts(nn.Module):
    """SwiGLU experts, stacked."""

    def __init__(self, config: Eagle4Config):
        super().__init__()
        experts, hidden = config.num_experts, config.hidden_size
        inner = config.moe_intermediate_size or config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
        nn.init.normal_(self.gate_up_proj, std=_STD)
        self.down_proj = nn.Parameter(torch.zeros(experts, inner, hidden))
        self.act = ACT2FN[config.hidden_act]

    def forward(
        self, hidden_RH: torch.Tensor, expert_RK: torch.Tensor, weight_RK: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of every row's chosen experts, ``[R, H]``."""
        top_k = expert_RK.shape[1]
        order_S = expert_RK.flatten().argsort(stable=True)
        rows_SH = repeat(hidden_RH, "r h -> (r k) h", k=top_k)[order_S]
        ends_E = choices(expert_RK, len(self.down_proj)).cumsum(0)
        gate_SI, up_SI = grouped_product(rows_SH, self.gate_up_proj, ends_E).chunk(2, dim=-1)
        out_SH = grouped_product(self.act(gate_SI) * up_SI, self.down_proj, ends_E)
        out_RKH = rearrange(out_SH[order_S.argsort()], "(r k) h -> r k h", k=top_k)
        return torch.einsum("rkh,rk->rh", out_RKH, weight_RK.to(out_RKH.dtype))


class DraftExperts(nn.Module):
    """Router and experts for rows of any leading shape."""

    def __init__(self, config: Eagle4Config):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows_RH = hidden.flatten(0, -2)
        return self.experts(rows_RH, *self.gate(rows_RH)).view(hidden.shape)


def choices(expert_RK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many rows chose every expert, int64 ``[E]``."""
    index_S = expert_RK.flatten()
    return index_S.new_zeros(num_experts).scatter_add_(0, index_S, torch.ones_like(index_S))


def grouped_product(
    rows_SH: torch.Tensor, weight_EHN: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """``rows[ends[e-1]:ends[e]] @ weight[e]`` for every expert, ``[S, N]``; ends on the device."""
    if torch.is_autocast_enabled(rows_SH.device.type):
        dtype = torch.get_autocast_dtype(rows_SH.device.type)
        rows_SH, weight_EHN = rows_SH.to(dtype), weight_EHN.to(dtype)
    weight_EHN = weight_EHN.to(rows_SH.dtype)
    if rows_SH.is_cuda and rows_SH.dtype == torch.bfloat16:
        return F.grouped_mm(rows_SH, weight_EHN, offs=ends_E.to(torch.int32))
    if torch.compiler.is_compiling():
        return _gathered_product(rows_SH, weight_EHN, ends_E)
    # On a CPU reading the ends costs nothing, and an expert without rows no product.
    starts = [0, *ends_E.tolist()]
    parts = [
        rows_SH[first:last] @ weight_EHN[e]
        for e, (first, last) in enumerate(zip(starts, starts[1:], strict=False))
        if last > first
    ]
    return torch.cat(parts) if parts else rows_SH.new_zeros(0, weight_EHN.shape[-1])


def _gathered_product(
    rows_SH: torch.Tensor, weight_EHN: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """The same with every row's own copy of its expert: static shapes, for few rows."""
    place_S = torch.arange(len(rows_SH), device=rows_SH.device)
    expert_S = torch.searchsorted(ends_E, place_S, right=True)
    return torch.einsum("sh,shn->sn", rows_SH, weight_EHN[expert_S])
