"""What makes a drafter configuration impossible: every check of `Eagle4Config` in one place.

Configurations come from files that others wrote, so types are checked before values are compared.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from transformers.activations import ACT2FN

if TYPE_CHECKING:
    from .config import Eagle4Config

# None has a meaning: no reduction, no window, or derived from the others.
_OPTIONAL_COUNTS = (
    "draft_vocab_size",
    "sliding_window",
    "num_key_value_heads",
    "head_dim",
    "target_hidden_size",
    "moe_intermediate_size",
)
_COUNTS = (
    *_OPTIONAL_COUNTS,
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
    "num_target_layers",
    "candidate_rank",
    "num_candidates",
    "num_experts",
    "num_experts_per_tok",
    "format_version",
)
_MAY_BE_ZERO = ("candidate_rank", "num_experts")
_SWITCHES = (
    "fc_norm",
    "eh_proj",
    "attn_norm",
    "norm_output",
    "use_rope",
    "own_embed_tokens",
    "own_lm_head",
    "norm_topk_prob",
    "moe_norm",
    "attention_bias",
    "mlp_bias",
)


def check_types(given: dict[str, Any], format_version: int) -> None:
    """Raise `ValueError` for the first constructor argument of a wrong type or range."""
    if is_count(given["format_version"], format_version + 1):
        raise ValueError(
            f"drafter format {given['format_version']} is newer than this library reads "
            f"({format_version}); update eagle4"
        )
    for key in _COUNTS:
        value, low = given[key], 0 if key in _MAY_BE_ZERO else 1
        if not is_count(value, low) and not (value is None and key in _OPTIONAL_COUNTS):
            raise ValueError(f"{key} must be an integer of at least {low}, got {value!r}")
    for key in _SWITCHES:
        if not isinstance(given[key], bool):
            raise ValueError(f"{key} must be true or false, got {given[key]!r}")
    eps, act, taps = (given[key] for key in ("rms_norm_eps", "hidden_act", "tap_layers"))
    if not isinstance(eps, (int, float)) or not math.isfinite(eps) or eps <= 0:
        raise ValueError(f"rms_norm_eps must be a positive number, got {eps!r}")
    scale = given["routed_scaling_factor"]
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"routed_scaling_factor must be a positive number, got {scale!r}")
    if not isinstance(act, str) or act not in ACT2FN:
        raise ValueError(f"hidden_act {act!r} is not an activation of Transformers")
    if taps is not None and not isinstance(taps, (list, tuple)):
        raise ValueError(f"tap_layers must be a list of block numbers, got {taps!r}")
    if not isinstance(given["tokenizer_fingerprint"], (str, type(None))):
        raise ValueError(
            f"tokenizer_fingerprint must be text, got {given['tokenizer_fingerprint']!r}"
        )


def check_structure(config: Eagle4Config) -> None:
    """Raise `ValueError` for the first thing that no drafter can be built from."""
    _check_taps(config.tap_layers, config.num_target_layers)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} must be a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    # Frequencies are computed before any shape is compared, so their number is bounded here.
    if config.head_dim % 2 or config.head_dim > 2**16:
        raise ValueError(f"head_dim must be even and at most 65536, got {config.head_dim}")
    if config.num_experts and config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            f"num_experts_per_tok {config.num_experts_per_tok} exceeds num_experts "
            f"{config.num_experts}"
        )
    if config.draft_vocab_size is not None:
        _check_reduced_vocabulary(config)
    if config.tie_word_embeddings:
        raise ValueError("tie_word_embeddings must be false: a drafter stores or borrows each one")


def is_count(value: Any, low: int) -> bool:
    """An integer (not a bool) of at least ``low`` that a tensor dimension can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**31


def _check_taps(taps: list[int], num_target_layers: int) -> None:
    last = num_target_layers - 1
    if not taps or any(not is_count(tap, 0) or tap > last for tap in taps):
        raise ValueError(
            f"tap_layers {taps} must name blocks 0..{last} of the target (outputs after the block)"
        )
    if len(set(taps)) != len(taps):
        raise ValueError(f"tap_layers {taps} names a block twice; give distinct blocks")


def _check_reduced_vocabulary(config: Eagle4Config) -> None:
    rows, vocab_size = config.draft_vocab_size, config.vocab_size
    if config.candidate_rank:
        raise ValueError(
            "a candidate head scores the full vocabulary; it cannot be combined with "
            f"draft_vocab_size={rows}"
        )
    if not config.own_lm_head or (rows is not None and rows > vocab_size):
        raise ValueError(
            f"draft_vocab_size={rows} needs own_lm_head=True and at most vocab_size={vocab_size} "
            "rows"
        )
