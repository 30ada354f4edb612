"""Configuration keys that mean different things in different projects, read one by one.

``tap_convention``: ``"post_block"`` (default: id i is the output of block i, as SGLang and
TorchSpec write it) or ``"hidden_states"`` (vLLM, speculators: id i is the input of block i, so one
more). Files without ids, the official EAGLE-3 ones among them, follow the rule of all public
drafters: inputs of blocks ``[2, L//2, L-3]``, which are the outputs of ``[1, L//2-1, L-4]``.

``norm_output_means``: ``"state"`` (default, EAGLE-3.1: the normalised output is the next step's
state) or ``"head"`` (SpecForge: the key only says that the final norm precedes the LM head, and
the state stays raw).

Both may be stored in the file under these names or given to the loader; a contradiction between
the two is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from transformers import PreTrainedConfig

from ..config import default_tap_layers
from ..structure import is_count

logger = logging.getLogger(__name__)

TapConvention = Literal["post_block", "hidden_states"]
NormOutputMeans = Literal["state", "head"]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def num_target_layers(raw: Mapping[str, Any], target_config: PreTrainedConfig | None) -> int:
    """Depth of the target: in the file, or from the target itself; they must agree."""
    stored = raw.get("num_target_layers")
    if stored is not None and not is_count(stored, 1):
        raise ValueError(f"num_target_layers must be an integer of at least 1, got {stored!r}")
    if target_config is None:
        if stored is None:
            raise ValueError(
                "the file does not say how many layers its target has (num_target_layers); pass "
                "target_config=target.config"
            )
        return stored
    actual = target_config.get_text_config(decoder=True).num_hidden_layers
    if stored not in (None, actual):
        raise ValueError(
            f"num_target_layers is {stored} but the target has {actual} layers; this drafter was "
            "made for another target"
        )
    return actual


def tap_layers(
    raw: Mapping[str, Any], num_layers: int, convention: TapConvention | None
) -> list[int]:
    """Tapped blocks (outputs, 0-indexed) in the order of concatenation."""
    stated = _agreed("tap_convention", convention, raw, ("post_block", "hidden_states"))
    ids = _layer_ids(raw)
    if ids is None:
        if num_layers < 7:
            raise ValueError(
                f"the file names no {LAYER_IDS}, and the usual rule needs a target of at least 7 "
                f"layers, not {num_layers}; add the ids to eagle_config"
            )
        return default_tap_layers(num_layers)
    if (
        stated is None
        and num_layers >= 7
        and ids == [i + 1 for i in default_tap_layers(num_layers)]
    ):
        logger.warning(
            "%s %s are read as outputs of these blocks, but look like the usual rule in the "
            "'hidden_states' spelling; pass tap_convention to settle it",
            *(LAYER_IDS, ids),
        )
    return [i - 1 for i in ids] if stated == "hidden_states" else ids


def norm_output(raw: Mapping[str, Any], is_eagle4: bool, means: NormOutputMeans | None) -> bool:
    """Whether the state of the next step is the normalised output."""
    stated = _agreed("norm_output_means", means, raw, ("state", "head"))
    value = raw.get("norm_output")
    if stated == "head":
        if value is False:
            raise ValueError(
                "norm_output=false in the sense of 'head' is an LM head on raw outputs, which this "
                "drafter does not have"
            )
        return False
    if value and stated is None and not is_eagle4:
        logger.warning(
            "norm_output=true is read as EAGLE-3.1 means it (normalised recurrence); for a drafter "
            "trained with SpecForge pass norm_output_means='head'"
        )
    return is_eagle4 if value is None else value


def sliding_window(raw: Mapping[str, Any]) -> int | None:
    """Window of the one layer, from ``sliding_window`` and the two switches that may undo it."""
    window, switch, types = (
        raw.get(key) for key in ("sliding_window", "use_sliding_window", "layer_types")
    )
    if types not in (None, ["full_attention"], ["sliding_attention"]):
        raise ValueError(f"layer_types {types} must name one full_attention or sliding_attention")
    if switch is False or types == ["full_attention"]:
        return None
    if window is None and (switch or types):
        raise ValueError("the file asks for sliding attention but gives no sliding_window")
    return window


def _layer_ids(raw: Mapping[str, Any]) -> list[int] | None:
    places = (raw.get(LAYER_IDS), (raw.get("eagle_config") or {}).get(LAYER_IDS))
    found = [ids for ids in places if ids is not None]
    if not found:
        return None
    ids = found[0]
    if any(other != ids for other in found):
        raise ValueError(f"{LAYER_IDS} is given twice and differently: {found}")
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ValueError(f"{LAYER_IDS} must be a list of integers, got {ids!r}")
    if raw.get("num_aux_hidden_states") not in (None, len(ids)):
        raise ValueError(
            f"num_aux_hidden_states {raw['num_aux_hidden_states']} and {LAYER_IDS} {ids} disagree"
        )
    return ids


def _agreed(
    key: str, argument: str | None, raw: Mapping[str, Any], allowed: tuple[str, ...]
) -> str | None:
    stored = raw.get(key)
    for value in (argument, stored):
        if value is not None and value not in allowed:
            raise ValueError(f"{key} must be one of {list(allowed)}, got {value!r}")
    if argument is not None and stored not in (None, argument):
        raise ValueError(f"{key}={argument!r} contradicts the file, which says {stored!r}")
    return argument or stored
