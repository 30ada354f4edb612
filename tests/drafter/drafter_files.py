"""Tiny drafters as files of every dialect, made without the library's own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle4.config import Eagle4Config
from eagle4.drafter import Eagle4Drafter

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


def small_drafter(**overrides):
    values = dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        vocab_size=50,
        num_target_layers=9,
        candidate_rank=4,
        num_candidates=8,
    )
    return Eagle4Drafter(Eagle4Config(**{**values, **overrides}))


# name -> (config.json, arguments of tensors_for, normalised recurrence)
EAGLE3_FILES = {
    "official": (eagle3_config(architectures=["LlamaForCausalLM"]), {}, False),
    "eagle3": (eagle3_config(), {"embed": True}, False),
    "eagle3.1": (eagle3_config(fc_norm=True, norm_output=True), {}, True),
    "wider target": (eagle3_config(target_hidden_size=48), {"embed": True}, False),
    "full vocabulary": (eagle3_config(draft_vocab_size=VOCAB), {}, False),
    "borrowed head": (eagle3_config(draft_vocab_size=VOCAB), {"head": False}, False),
    "biases": (eagle3_config(attention_bias=True), {}, False),
    "two taps": (
        eagle3_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 5]}),
        {"taps": 2},
        False,
    ),
}
EAGLE4_FILES = {
    "2H-wide": (eagle4_config(fc_norm=True), {"rank": 6}, True),
    "eh_proj": (eagle4_config(fc_norm=True), {"rank": 6, "eh_proj": True, "embed": True}, True),
    "no candidate head": (eagle4_config(), {"eh_proj": True}, True),
    "borrowed head": (eagle4_config(), {"rank": 6, "head": False}, True),
}
ALL_FILES = {**EAGLE3_FILES, **{f"eagle4 {k}": v for k, v in EAGLE4_FILES.items()}}
