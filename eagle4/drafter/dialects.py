"""What other projects call the same drafter: configuration keys and tensor names.

Read: EAGLE-3 and 3.1 (``LlamaForCausalLMEagle3``, and the official ``LlamaForCausalLM``) with the
layer named ``midlayer.``, ``layers.0.`` or ``model.layers.0.``, and the EAGLE-4 serving layout
(``LlamaForCausalLMEagle4``), which is also what we write. Unknown keys are errors: a switch that
nobody reads would lower acceptance and tell no one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..config import Eagle4Config
from ..rope import read_rope, write_rope
from . import conventions
from .conventions import LAYER_IDS, NormOutputMeans, TapConvention

EAGLE4 = "LlamaForCausalLMEagle4"
EAGLE3 = ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "LlamaEagle3DraftModel")
_PREFIXES = ("layers.0.", "midlayer.", "model.layers.0.")

_REQUIRED = "hidden_size intermediate_size num_attention_heads vocab_size rms_norm_eps".split()
# Keys with our own name and meaning in every dialect.
_SAME = [
    *_REQUIRED,
    *"num_key_value_heads head_dim hidden_act max_position_embeddings attention_bias".split(),
    *"mlp_bias draft_vocab_size target_hidden_size fc_norm tokenizer_fingerprint".split(),
]
_EAGLE4_KEYS = [
    *"eh_proj attn_norm use_rope candidate_rank num_candidates".split(),
    *"own_embed_tokens own_lm_head format_version".split(),
]
# Of MoE drafters only; a dense drafter's file does not name them.
_MOE_KEYS = [
    *"num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob".split(),
    *"routed_scaling_factor moe_norm".split(),
]
# Keys that need more than a copy.
_TRANSLATED = [
    *"architectures model_type num_hidden_layers num_target_layers tie_word_embeddings".split(),
    *"rope_parameters rope_scaling rope_theta sliding_window use_sliding_window".split(),
    *"layer_types eagle_config num_aux_hidden_states tap_convention norm_output".split(),
    *("norm_output_means", LAYER_IDS),
]
# Written by training frameworks, without effect on the forward pass. (Whether there is a "bias"
# shows in the tensors, and an unknown tensor is an error.)
_NEUTRAL = [
    *"attention_dropout auto_map bias bos_token_id eos_token_id initializer_range".split(),
    *"max_window_layers pad_token_id pretraining_tp torch_dtype use_cache".split(),
    *PreTrainedConfig().to_dict(),
]
# The structure that this drafter has; any other value describes another drafter.
_EAGLE_CONFIG = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
_EAGLE3_STRUCTURE = {"eh_proj": False, "fc_norm": False, "candidate_rank": 0}
_LLAMA_DEFAULTS = {"max_position_embeddings": 2048, "hidden_act": "silu"}


def layer_prefix(names: Iterable[str]) -> str:
    """The dialect of a file's tensor names, by the prefix of its one layer."""
    names = list(names)
    found = [p for p in _PREFIXES if any(name.startswith(p) for name in names)]
    if len(found) > 1:
        mixed = sorted(name for name in names if name.startswith(tuple(found)))
        raise ValueError(f"tensors mix the layer prefixes {found}: {mixed}")
    return found[0] if found else _PREFIXES[0]


def file_name(name: str, prefix: str) -> str:
    """What a file of this dialect calls our tensor ``name``."""
    if name.startswith("layers.0."):
        return prefix + name.removeprefix("layers.0.")
    is_body = name.split(".")[0] in ("fc", "fc_norm", "norm", "embed_tokens")
    return f"model.{name}" if prefix.startswith("model.") and is_body else name


def read_config(
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    target_config: PreTrainedConfig | None = None,
    tap_convention: TapConvention | None = None,
    norm_output_means: NormOutputMeans | None = None,
) -> Eagle4Config:
    """Our configuration for a ``config.json`` and the tensors that lie next to it.

    Tensors decide only what the configuration leaves open: whether embedding and head are
    borrowed, and the structure of EAGLE-4 files that do not name it. Raises `ValueError`.
    """
    is_eagle4 = _architecture(raw) == EAGLE4
    keys = _SAME + (_EAGLE4_KEYS + _MOE_KEYS if is_eagle4 else [])
    _check_keys(raw, keys)
    _check_structure(raw)
    given = {**_LLAMA_DEFAULTS, **{key: raw[key] for key in keys if raw.get(key) is not None}}
    num_layers = conventions.num_target_layers(raw, target_config)
    translated = {
        "rope_parameters": read_rope(raw, given["max_position_embeddings"]),
        "sliding_window": conventions.sliding_window(raw),
        "num_target_layers": num_layers,
        "tap_layers": conventions.tap_layers(raw, num_layers, tap_convention),
        "norm_output": conventions.norm_output(raw, is_eagle4, norm_output_means),
    }
    structure = _seen_structure(tensors) if is_eagle4 else _EAGLE3_STRUCTURE
    return Eagle4Config(**{**structure, **_seen_ownership(raw, tensors), **given, **translated})


def write_config(config: Eagle4Config, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of the EAGLE-4 serving layout: Llama's keys and our own."""
    own = (*_SAME, *_EAGLE4_KEYS, *(_MOE_KEYS if config.num_experts else ()))
    return {
        **{key: getattr(config, key) for key in own},
        **write_rope(config.rope_parameters),
        "architectures": [EAGLE4],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "dtype": dtype,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "norm_output": config.norm_output,
        "norm_output_means": "state",
        "num_target_layers": config.num_target_layers,
        "num_aux_hidden_states": len(config.tap_layers),
        "tap_convention": "post_block",
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: list(config.tap_layers)},
    }


def _architecture(raw: Mapping[str, Any]) -> str:
    given, model_type = raw.get("architectures"), raw.get("model_type", "llama")
    names = [EAGLE3[0]] if given is None else given
    if names not in [[name] for name in (*EAGLE3, EAGLE4)] or model_type != "llama":
        raise ValueError(
            f"architectures {given} with model_type {model_type!r} is not a drafter that this "
            f"library reads; it reads model_type 'llama' with one of {[*EAGLE3, EAGLE4]}"
        )
    return names[0]


def _check_keys(raw: Mapping[str, Any], keys: list[str]) -> None:
    inner = raw.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"eagle_config must be an object, got {inner!r}")
    unknown = sorted(set(raw) - {*keys, *_TRANSLATED, *_NEUTRAL})
    unknown += sorted(f"eagle_config.{key}" for key in set(inner) - {*_EAGLE_CONFIG, LAYER_IDS})
    missing = [key for key in _REQUIRED if raw.get(key) is None]
    if unknown or missing:
        raise ValueError(
            f"unknown keys {unknown}, missing keys {missing}. An unknown key may change the "
            "structure; remove it only when you know that it does not"
        )


def _check_structure(raw: Mapping[str, Any]) -> None:
    if raw.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"num_hidden_layers must be 1, got {raw['num_hidden_layers']}")
    for key, value in _EAGLE_CONFIG.items():
        given = (raw.get("eagle_config") or {}).get(key, value)
        if given is not None and given != value:
            raise ValueError(f"eagle_config.{key}={given!r} is another drafter; must be {value}")


def _has(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    return file_name(name, layer_prefix(tensors)) in tensors


def _seen_structure(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    axes = {"efficient_lm_head_down_proj.weight": 0, "efficient_lm_head.weight": -1}
    ranks = [tensors[name].shape[axis] for name, axis in axes.items() if _is_matrix(tensors, name)]
    return {
        "fc_norm": any(_has(tensors, f"fc_norm.{i}.weight") for i in range(64)),
        "eh_proj": _has(tensors, "layers.0.eh_proj.weight"),
        "attn_norm": _has(tensors, "layers.0.attn_norm.weight"),
        "candidate_rank": ranks[0] if ranks else 0,
    }


def _is_matrix(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    return name in tensors and tensors[name].ndim == 2


def _seen_ownership(raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A matrix that the file lacks is borrowed, unless the target's could not take its place."""
    hidden = raw["hidden_size"]
    is_foreign_width = raw.get("target_hidden_size") not in (None, hidden)
    is_reduced = raw.get("draft_vocab_size") not in (None, raw["vocab_size"])
    own_embed = is_foreign_width or _has(tensors, "embed_tokens.weight")
    is_tied = bool(raw.get("tie_word_embeddings")) and own_embed
    own_head = is_foreign_width or is_reduced or is_tied or _has(tensors, "lm_head.weight")
    return {"own_embed_tokens": own_embed, "own_lm_head": own_head}
