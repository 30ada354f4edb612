"""Tiny drafters as files of every dialect, and a forward pass that shares no code with the library.

The reference follows the papers in plain tensor algebra: einsum, an explicit causal mask, rotation
by complex numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 40, 4, 2, 8
VOCAB, REDUCED, LAYERS, ROWS = 60, 24, 9, 7
DIALECTS = ("midlayer", "layers", "model")
Tensors = dict[str, torch.Tensor]


def eagle3_config(**overrides: Any) -> dict[str, Any]:
    """A ``config.json`` in the EAGLE-3 schema."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "draft_vocab_size": REDUCED,
        "num_target_layers": LAYERS,
        **overrides,
    }


def eagle4_config(**overrides: Any) -> dict[str, Any]:
    """A ``config.json`` as other projects export EAGLE-4: no key of our own but the depth."""
    other = {"architectures": ["LlamaForCausalLMEagle4"], "draft_vocab_size": VOCAB}
    return eagle3_config(**{**other, **overrides})


def tensors_for(
    config: dict[str, Any], *, eh_proj: bool = False, rank: int = 0, **extra
) -> Tensors:
    """Random weights under our own names. ``extra``: embed, head, taps, seed."""
    generator = torch.Generator().manual_seed(extra.get("seed", 0))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def norm(width: int = HIDDEN) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(width, generator=generator)

    tapped = config.get("target_hidden_size", HIDDEN)
    num_taps = extra.get("taps", 3)
    reads = HIDDEN if eh_proj else 2 * HIDDEN
    draft_vocab = config["draft_vocab_size"]
    tensors = {
        "fc.weight": random(HIDDEN, num_taps * tapped),
        "norm.weight": norm(),
        "layers.0.input_layernorm.weight": norm(),
        "layers.0.hidden_norm.weight": norm(),
        "layers.0.post_attention_layernorm.weight": norm(),
        "layers.0.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, reads),
        "layers.0.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, reads),
        "layers.0.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, reads),
        "layers.0.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": random(INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": random(INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": random(HIDDEN, INNER),
    }
    if extra.get("head", True):
        tensors["lm_head.weight"] = random(draft_vocab, HIDDEN)
    if extra.get("embed", False):
        tensors["embed_tokens.weight"] = random(VOCAB, HIDDEN)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(tapped) for i in range(num_taps)}
    if config.get("attention_bias"):
        sizes = {
            "q": HEADS * HEAD_DIM,
            "k": KV_HEADS * HEAD_DIM,
            "v": KV_HEADS * HEAD_DIM,
            "o": HIDDEN,
        }
        tensors |= {f"layers.0.self_attn.{n}_proj.bias": random(s) for n, s in sizes.items()}
    if eh_proj:
        tensors["layers.0.eh_proj.weight"] = random(HIDDEN, 2 * HIDDEN)
        tensors["layers.0.attn_norm.weight"] = norm()
    if rank:
        tensors["efficient_lm_head.weight"] = random(VOCAB, rank)
        tensors["efficient_lm_head_down_proj.weight"] = random(rank, HIDDEN)
    if draft_vocab < VOCAB:
        tensors |= vocabulary_map(generator)
    return tensors


def vocabulary_map(generator: torch.Generator) -> Tensors:
    """An unsorted map: nothing promises that kept ids ascend."""
    kept = torch.randperm(VOCAB, generator=generator)[:REDUCED]
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[kept] = True
    return {"d2t": kept - torch.arange(REDUCED), "t2d": mask}


def in_dialect(tensors: Tensors, dialect: str) -> Tensors:
    """The same tensors under the names of another project."""
    if dialect == "layers":
        return dict(tensors)
    renamed = {}
    for name, value in tensors.items():
        if name.startswith("layers.0.") and dialect == "midlayer":
            name = "midlayer." + name[len("layers.0.") :]
        elif dialect == "model" and name not in ("lm_head.weight", "d2t", "t2d"):
            name = "model." + name
        renamed[name] = value
    return renamed


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


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
