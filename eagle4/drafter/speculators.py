"""The speculators project's configuration of an EAGLE-3 drafter, read and written.

Sizes lie in a nested ``transformer_layer_config``, tap ids count inputs of blocks (one more than
outputs), and ``speculators_config`` says which model verifies. Tensors are the EAGLE-3 serving
layout's. Two variants of theirs are other drafters than ours and are refused by name: a residual
after the norm, and one norm over all taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Eagle4Config
from ..rope import write_rope
from .conventions import LAYER_IDS

MODEL_TYPE = "speculators_model_type"
_LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size"),
    *("attention_bias", "mlp_bias"),
)
_OWN = ("draft_vocab_size", "fc_norm", "norm_output", "target_hidden_size", LAYER_IDS)
_KEPT = ("num_target_layers", "tokenizer_fingerprint", "norm_output_means")
_VARIANTS = ("norm_before_residual", "norm_before_fc")
_NEUTRAL = (
    *("speculators_version", "architectures", "speculators_config", "embed_requires_grad"),
    *("transformers_version", "dtype", "torch_dtype", "model_type", "tie_word_embeddings"),
    *("auto_map", MODEL_TYPE, "transformer_layer_config"),
)


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of this project."""
    return MODEL_TYPE in raw


def from_speculators(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter as an EAGLE-3 ``config.json``. Raises `ValueError` for another algorithm."""
    if raw[MODEL_TYPE] != "eagle3":
        raise ValueError(f"{MODEL_TYPE} {raw[MODEL_TYPE]!r} cannot be read; 'eagle3' can")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError("transformer_layer_config must be an object with the layer's sizes")
    unknown = sorted(set(raw) - {*_OWN, *_KEPT, *_VARIANTS, *_NEUTRAL})
    if unknown:
        raise ValueError(f"unknown keys {unknown}; they may change the structure")
    for key in _VARIANTS:
        if raw.get(key):
            raise ValueError(f"{key}=true is another drafter than EAGLE-3's; it cannot be read")
    flat = {key: value for key, value in layer.items() if key not in ("architectures", LAYER_IDS)}
    flat |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    flat |= {key: raw[key] for key in (*_OWN, *_KEPT) if raw.get(key) is not None}
    return {**flat, "tap_convention": "hidden_states"}


def to_speculators(config: Eagle4Config, dtype: str, verifier: str | None) -> dict[str, Any]:
    """Their ``config.json`` for a drafter in the EAGLE-3 form; ``verifier`` names the target."""
    layer = {key: getattr(config, key) for key in _LAYER_KEYS}
    window = config.sliding_window
    layer |= {**write_rope(config.rope_parameters), "model_type": "llama", "num_hidden_layers": 1}
    layer |= {"sliding_window": window, "use_sliding_window": window is not None}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        MODEL_TYPE: "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_output_means": "state",
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.num_target_layers,
        "tokenizer_fingerprint": config.tokenizer_fingerprint,
        LAYER_IDS: [tap + 1 for tap in config.tap_layers],
        "embed_requires_grad": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
