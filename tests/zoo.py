"""Tiny random fp32 targets of many families, with windows smaller than the tests' contexts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
)

VOCAB = 96
WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Larger than the usual 0.02, so that the argmax depends on the context.
    "initializer_range": 0.3,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT = {"num_key_value_heads": None, "intermediate_size": None}

# name -> model type and overrides of SIZES; None removes a key.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW, "head_dim": 8},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, **_EXPERTS},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "final_logit_softcapping": 5.0,
    },
    "phi3": {"model_type": "phi3", "sliding_window": WINDOW},
    "olmo2": {"model_type": "olmo2"},
    "gpt2": {"model_type": "gpt2", **_GPT, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
    },
}
# Proven as well, with fewer cases.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {
        "model_type": "cohere2",
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        "logit_scale": 1.0,
    },
    "granite": {"model_type": "granite"},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": WINDOW},
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "glm4": {"model_type": "glm4", "head_dim": 8},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
# Families whose sdpa path differs from their definition (soft caps, sinks).
_EAGER = ("gemma2", "gpt_oss")


def build(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The family's tiny model, in eval mode."""
    merged = {**SIZES, **{**FAMILIES, **MORE_FAMILIES}[name], **overrides}
    return build_model(seed, **merged)


def build_model(
    seed: int = 0, *, model_type: str, attention: str | None = None, **settings: Any
) -> PreTrainedModel:
    """A causal LM with random weights, norms and biases included. None removes a setting."""
    kept = {k: v for k, v in settings.items() if v is not None or k.endswith("_token_id")}
    config = AutoConfig.for_model(model_type, **kept)
    attention = attention or ("eager" if model_type in _EAGER else "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model.float().eval()


def tiny_gemma3_with_vision(seed: int = 0) -> PreTrainedModel:
    """A multimodal model whose decoder is Gemma 3."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    sizes = {**sizes, "intermediate_size": 16, "initializer_range": 0.3}
    config = Gemma3Config(
        text_config={**sizes, "vocab_size": 32, "head_dim": 8, "num_key_value_heads": 1},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=30,
        boi_token_index=29,
        eoi_token_index=28,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gemma3ForConditionalGeneration(config).float().eval()


def prompts(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Prompts of 1, W - 3, W and 2 W + 3 tokens, and a left-padded batch of three."""
    generator = torch.Generator().manual_seed(seed)
    longest = 2 * WINDOW + 3
    ids = torch.randint(1, VOCAB, (4, longest), generator=generator)
    found = {}
    for name, row, length in (("one", 0, 1), ("below", 1, WINDOW - 3), ("equal", 2, WINDOW)):
        found[name] = {"input_ids": ids[row : row + 1, -length:]}
    found["longer"] = {"input_ids": ids[3:]}
    batch, mask = ids[1:].clone(), torch.ones_like(ids[1:])
    for row, length in ((0, WINDOW - 3), (1, WINDOW)):
        batch[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    found["batch"] = {"input_ids": batch, "attention_mask": mask}
    return found
