"""The only per-family table: which targets take packed rows, and why others do not.

``PROVEN`` families are tested greedy fp32 token for token against Transformers' own `generate`
(tests/target). ``REFUSED`` families are refused by name with what is missing. Anything else is
probed when it is attached: a packed forward must reproduce a plain forward, else it is refused.
"""

from __future__ import annotations

from transformers import PreTrainedModel

PROVEN = frozenset(
    {
        "llama",
        "smollm3",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
    }
)

_ALIBI = "its ALiBi bias is computed from the key index, so drafted rows get the wrong bias"
_STATE = "its recurrent layers need per-node states that are not supported yet"
REFUSED = {
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "jamba": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "falcon_mamba": _STATE,
    "recurrent_gemma": _STATE,
    "rwkv": _STATE,
    "llama4_text": "its chunked attention layers are not expressed by a sliding window",
}

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_target(model: PreTrainedModel) -> None:
    """Raise `ValueError` when the model cannot verify packed rows, naming what is missing."""
    config = model.config.get_text_config(decoder=True)
    name = f"target {type(model).__name__} (model_type {config.model_type!r})"
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; eagle4 needs a decoder-only causal LM")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no LM head; load it with AutoModelForCausalLM")
    if config.model_type in REFUSED:
        raise ValueError(f"{name} cannot be a target: {REFUSED[config.model_type]}")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} cannot be a target: {_STATE}")
    if getattr(config, "alibi", False):
        raise ValueError(f"{name} cannot be a target: {_ALIBI}")
    kinds = set(getattr(config, "layer_types", None) or []) - ATTENTION_LAYER_TYPES
    if kinds:
        raise ValueError(
            f"{name} cannot be a target: layer types {sorted(kinds)} are not supported; "
            f"allowed are {sorted(ATTENTION_LAYER_TYPES)}"
        )
    if config.model_type not in PROVEN and not getattr(model, "_supports_sdpa", False):
        raise ValueError(
            f"{name} cannot be a target: it does not use Transformers' attention interface"
        )


def is_proven(model: PreTrainedModel) -> bool:
    """Whether the family is covered by tests; others are probed."""
    return model.config.get_text_config(decoder=True).model_type in PROVEN
