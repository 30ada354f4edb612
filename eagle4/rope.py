"""RoPE settings in both schemas: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``.

Both spellings of the same settings must give identical inverse frequencies, or a drafter looks
healthy on short inputs and loses its acceptance on long ones. So every setting is read from either
schema, both are written, a contradiction is an error, and so is a key that nobody would read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

# What Llama uses when its configuration names no base; old EAGLE-3 files rely on it.
LLAMA_THETA = 10000.0

_ALIASES = {"su": "longrope", "mrope": "default"}
# Sections of multimodal RoPE: for text all of them carry the same position, which is plain RoPE.
_TEXT_NEUTRAL = {"mrope_section", "mrope_interleaved"}
_ORIGINAL = "original_max_position_embeddings"
# rope_type -> (required keys, optional keys)
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor"},
        {
            _ORIGINAL,
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {_ORIGINAL}),
    "longrope": ({"short_factor", "long_factor"}, {_ORIGINAL, "factor", "attention_factor"}),
}


def normalize_rope(parameters: Any, max_position_embeddings: int) -> dict[str, Any]:
    """One canonical ``rope_parameters`` dict: ``rope_type``, ``rope_theta``, then its own keys.

    Raises `ValueError` for an unknown type, an unknown or missing key, or no theta.
    """
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters must be a dict, got {parameters!r}")
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = _rope_type(given)
    if kind not in _KEYS:
        raise ValueError(f"rope_type {kind!r} is not supported; allowed are {sorted(_KEYS)}")
    theta = given.pop("rope_theta", None)
    if not _is_positive(theta):
        raise ValueError(f"rope_theta must be a positive number, got {theta!r}")
    if given.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor is not supported: a drafter rotates whole heads")
    required, optional = _KEYS[kind]
    unknown, missing = set(given) - required - optional, required - set(given)
    if unknown or missing:
        raise ValueError(
            f"RoPE settings of type {kind!r}: unknown keys {sorted(unknown)}, "
            f"missing keys {sorted(missing)}"
        )
    if _ORIGINAL in optional:
        given.setdefault(_ORIGINAL, max_position_embeddings)
    for key in given.keys() & {"factor", _ORIGINAL}:
        if not _is_positive(given[key]):
            raise ValueError(f"RoPE setting {key} must be a positive number, got {given[key]!r}")
    return {"rope_type": kind, "rope_theta": float(theta), **given}


def read_rope(raw: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """Canonical settings of a ``config.json`` in either schema, or in both when they agree."""
    new, scaling, theta = (
        raw.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")
    )
    inner = new.get("rope_theta") if isinstance(new, Mapping) else None
    if theta is not None and inner is not None and theta != inner:
        raise ValueError(f"rope_theta is {theta} but rope_parameters says {inner}; keep one")
    base = inner if theta is None else theta
    if base is None:
        base = LLAMA_THETA
        logger.warning("config.json names no rope_theta; Llama's own default %s is used", base)
    found = [
        normalize_rope({"rope_theta": base, **_as_mapping(part)}, max_position_embeddings)
        for part in (new, scaling)
        if part is not None
    ]
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(
            f"rope_parameters {found[0]} contradicts rope_scaling {found[1]}; keep one of them"
        )
    return found[0] if found else normalize_rope({"rope_theta": base}, max_position_embeddings)


def write_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both schemas for canonical settings."""
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {
        "rope_parameters": dict(parameters),
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
    }


def rope_for_target(text_config: Any) -> dict[str, Any]:
    """What a new drafter takes over from its target.

    Per-layer settings give those of the full-attention layers. Partial rotation and types that a
    Llama-style layer cannot compute leave only the base: the drafter is trained, so any RoPE is
    legal as long as it is stored.
    """
    rope = dict(getattr(text_config, "rope_parameters", None) or {})
    if "rope_theta" not in rope and any(isinstance(value, Mapping) for value in rope.values()):
        nested = [value for value in rope.values() if isinstance(value, Mapping)]
        rope = dict(rope.get("full_attention") or nested[0])
    theta = rope.get("rope_theta") or getattr(text_config, "rope_theta", None) or LLAMA_THETA
    kind = _rope_type(dict(rope))
    if rope.get("partial_rotary_factor", 1) not in (None, 1) or kind not in _KEYS:
        rope = {}
    return {**rope, "rope_theta": theta}


def _rope_type(given: dict[str, Any]) -> str:
    """Remove every spelling of the type from ``given`` and return the canonical one."""
    spelled = [given.pop(key) for key in ("rope_type", "type") if key in given]
    kinds = {_ALIASES.get(kind, kind) if isinstance(kind, str) else repr(kind) for kind in spelled}
    if len(kinds) > 1:
        raise ValueError(f"RoPE type is given twice and differently: {spelled}")
    for key in _TEXT_NEUTRAL:
        given.pop(key, None)
    return kinds.pop() if kinds else "default"


def _as_mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ValueError(f"RoPE settings must be a dict, got {value!r}")


def _is_positive(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
