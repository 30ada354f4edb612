"""Tiny random fp32 hybrids of attention and recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
import zoo
from transformers import PreTrainedModel

_LINEAR, _FULL = "linear_attention", "full_attention"
_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": [_LINEAR, _FULL, _LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_NO_HEAD_DIM = {"head_dim": None}
# name -> model type and overrides of zoo.SIZES; None removes a key.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"model_type": "qwen3_next", **_DELTA, **_EXPERTS},
    "qwen3_5": {"model_type": "qwen3_5_text", **_DELTA},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **_DELTA, **_EXPERTS},
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        **_DELTA,
        "head_dim": None,
        "linear_num_key_heads": 4,
    },
    "bamba": {"model_type": "bamba", **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {"model_type": "falcon_h1", **_MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "falcon_h1_norm": {
        "model_type": "falcon_h1",
        **_MAMBA,
        "mamba_d_ssm": 64,
        "head_dim": 8,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "ssm_in_multiplier": 0.7,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **_MAMBA,
        "layer_types": [_LINEAR, _FULL, _LINEAR],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "attention_multiplier": 0.3,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": [_LINEAR, _FULL, "moe", _LINEAR, "mlp"],
        "num_hidden_layers": None,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        # Transformers limits the time step in prompts only; so low, prompts and tokens are alike.
        "time_step_min": 1e-9,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", _FULL, "conv"]},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", _FULL, "conv"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
}


def build(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The family's tiny model, in eval mode."""
    model = zoo.build_model(seed, **{**zoo.SIZES, **HYBRIDS[name], **overrides})
    for key, parameter in model.named_parameters():
        if key.endswith("conv1d.weight") or key.endswith("conv.weight"):
            # As strong as the rest, so that the window matters.
            parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=_generator(seed)))
    return model


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
