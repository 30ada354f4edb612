"""A drafter's forward pass that shares no code with the library.

It follows the papers in plain tensor algebra: einsum, an explicit causal mask, rotation by complex
numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.drafter.drafter_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, ROWS, VOCAB, Tensors


class Lender:
    """Embedding and LM head of a target, and inputs of a few rows."""

    def __init__(self, tapped: int = HIDDEN, taps: int = 3, seed: int = 5):
        generator = torch.Generator().manual_seed(seed)
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for module in (self.embed_tokens, self.lm_head):
            module.weight.data = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.features = 4 * torch.randn(ROWS, taps, tapped, generator=generator)
        self.ids = torch.randint(0, VOCAB, (ROWS,), generator=generator)
        self.position = torch.arange(3, 3 + ROWS)

    def run(self, drafter):
        """Two steps of a drafter: on features, then on its own state."""
        drafter.bind(self.embed_tokens, self.lm_head)
        with torch.no_grad():
            first = drafter(drafter.fuse(self.features), self.ids, self.position, attend)
            return first, drafter(first.state_RH, self.ids.flip(0), self.position + 1, attend)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention over rows ``[T, heads, D]``."""
    parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
    out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def reference_run(config: dict[str, Any], tensors: Tensors, lender: Lender, norm_output: bool):
    """``(head input, state)`` of the two steps of `Lender.run`, from the papers."""
    features = lender.features
    if "fc_norm.0.weight" in tensors:
        parts = [
            rms(features[:, i], tensors[f"fc_norm.{i}.weight"]) for i in range(features.shape[1])
        ]
    else:
        parts = [features[:, i] for i in range(features.shape[1])]
    state = torch.cat(parts, -1) @ tensors["fc.weight"].T
    table = tensors.get("embed_tokens.weight", lender.embed_tokens.weight.detach())
    steps = []
    for ids, position in ((lender.ids, lender.position), (lender.ids.flip(0), lender.position + 1)):
        out = reference_layer(config, tensors, table[ids], state, position)
        head = rms(out, tensors["norm.weight"])
        state = head if norm_output else out
        steps.append((head, state))
    return steps


def reference_layer(config, tensors, embed, state, position):
    layer = {k[len("layers.0.") :]: v for k, v in tensors.items() if k.startswith("layers.0.")}
    fused = torch.cat(
        [rms(embed, layer["input_layernorm.weight"]), rms(state, layer["hidden_norm.weight"])], -1
    )
    residual = state
    if "eh_proj.weight" in layer:
        residual = fused @ layer["eh_proj.weight"].T
        fused = rms(residual, layer["attn_norm.weight"])

    def heads(name):
        bias = layer.get(f"self_attn.{name}_proj.bias", 0)
        return (fused @ layer[f"self_attn.{name}_proj.weight"].T + bias).view(
            len(fused), -1, HEAD_DIM
        )

    theta = config["rope_theta"]
    query, key = (rotate(heads(name), position, theta) for name in ("q", "k"))
    share = HEADS // KV_HEADS
    key, value = (part.repeat_interleave(share, dim=1) for part in (key, heads("v")))
    score = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    future = torch.ones(len(fused), len(fused)).triu(1).bool()
    weight = score.masked_fill(future, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weight, value).flatten(1)
    attention = mixed @ layer["self_attn.o_proj.weight"].T + layer.get("self_attn.o_proj.bias", 0)
    hidden = residual + attention
    normed = rms(hidden, layer["post_attention_layernorm.weight"])
    gate = F.silu(normed @ layer["mlp.gate_proj.weight"].T)
    return (
        hidden + (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    )


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: torch.Tensor, position: torch.Tensor, theta: float) -> torch.Tensor:
    """Dimensions i and i + D/2 form one complex number, turned by position * theta^(-2i/D)."""
    half = HEAD_DIM // 2
    speed = theta ** (-torch.arange(half) / half)
    angle = position[:, None, None] * speed
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], -1)


def assert_follows_reference(drafter, config, tensors, norm_output):
    lender = Lender(config.get("target_hidden_size", HIDDEN), len(drafter.config.tap_layers))
    expected = reference_run(config, tensors, lender, norm_output)
    for found, (head, state) in zip(lender.run(drafter), expected, strict=True):
        torch.testing.assert_close(found.head_RH, head, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(found.state_RH, state, rtol=2e-4, atol=2e-4)
