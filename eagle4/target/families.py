"""The only per-family table: which targets take packed rows, and why others do not.

``PROVEN`` and ``HYBRID`` families are tested greedy fp32 token for token against Transformers' own
`generate` (tests/target). ``REFUSED`` families are refused by name with what is missing. Anything
else is probed when it is attached (probe.py): packed tree rows must reproduce plain forwards, and
the attention calls must pass the declared windows and nothing that is not understood.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

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
        "cohere2",
        "granite",
        "starcoder2",
        "olmo3",
        "mixtral",
        "glm4",
        "deepseek_v3",
    }
)
# Hybrids of attention and recurrent layers, see mixers.py. Proven as well.
HYBRID = frozenset(
    {
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "olmo_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "nemotron_h",
        "lfm2",
        "lfm2_moe",
    }
)

_ALIBI = "its ALiBi bias is computed from the key index, so drafted rows get the wrong bias"
_CHANNELS = (
    "recurrent layers that decay every channel on its own have no tree form in eagle4 "
    "(Gated DeltaNet, Mamba-2 and short convolutions have)"
)
REFUSED = {
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "jamba": _CHANNELS,
    "mamba": _CHANNELS,
    "falcon_mamba": _CHANNELS,
    "zamba": _CHANNELS,
    "recurrent_gemma": _CHANNELS,
    "kimi_linear": _CHANNELS,
    "rwkv": _CHANNELS,
    "mamba2": "a model of recurrent layers alone is not supported; hybrids with attention are",
    "llama4_text": "its chunked attention layers are not expressed by a sliding window",
}

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
HYBRID_LAYER_TYPES = ATTENTION_LAYER_TYPES | {"linear_attention", "conv", "hybrid", "mlp", "moe"}

# Arguments of attention calls that change nothing for packed rows; their positions, masks and
# causality come from the step.
HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "is_causal", "output_attentions", "use_cache", "cache_position"}
)


def check_target(model: PreTrainedModel) -> None:
    """Raise `ValueError` when the model cannot verify packed rows, naming what is missing."""
    config = model.config.get_text_config(decoder=True)
    name = describe(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; eagle4 needs a decoder-only causal LM")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no LM head; load it with AutoModelForCausalLM")
    if config.model_type in REFUSED:
        raise ValueError(f"{name} cannot be a target: {REFUSED[config.model_type]}")
    is_hybrid = config.model_type in HYBRID
    if getattr(model, "_is_stateful", False) and not is_hybrid:
        raise ValueError(
            f"{name} cannot be a target: its recurrent layers have no packed form in eagle4; "
            f"hybrids that have are {sorted(HYBRID)}"
        )
    if getattr(config, "alibi", False):
        raise ValueError(f"{name} cannot be a target: {_ALIBI}")
    allowed = HYBRID_LAYER_TYPES if is_hybrid else ATTENTION_LAYER_TYPES
    kinds = set(getattr(config, "layer_types", None) or []) - allowed
    if kinds:
        raise ValueError(
            f"{name} cannot be a target: layer types {sorted(kinds)} are not supported; "
            f"allowed are {sorted(allowed)}"
        )
    _check_rope(name, config)
    if not (model._supports_sdpa or getattr(model, "_supports_attention_backend", False)):
        raise ValueError(
            f"{name} cannot be a target: it does not use Transformers' attention interface"
        )


def _check_rope(name: str, config: PreTrainedConfig) -> None:
    """Refuse frequencies that depend on the longest position of the forward, in reach of it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        switch = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and config.max_position_embeddings > (switch or 0):
            raise ValueError(
                f"{name} cannot be a target: its longrope changes all frequencies as soon as one "
                f"row of a forward passes position {switch}, so packed rows would disturb each "
                f"other; to stay below, set target.config.max_position_embeddings = {switch} "
                "after loading"
            )


def describe(model: PreTrainedModel) -> str:
    """How errors name a target."""
    kind = model.config.get_text_config(decoder=True).model_type
    return f"target {type(model).__name__} (model_type {kind!r})"


def is_proven(model: PreTrainedModel) -> bool:
    """Whether Transformers' own class of the family is covered by tests; others are probed.

    A multimodal model around a proven decoder is not proven: its own forward comes first.
    """
    is_stock = type(model).__module__.startswith("transformers.models.")
    return is_stock and is_proven_type(model.config.model_type)


def is_proven_type(model_type: str) -> bool:
    """Whether Transformers' own class for this ``model_type`` is covered by tests."""
    return model_type in PROVEN | HYBRID


def declared_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of every layer as the config declares it; None is full attention."""
    window = getattr(config, "sliding_window", None) or None
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
