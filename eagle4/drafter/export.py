"""Drafters for other engines: the EAGLE-3 / 3.1 serving layout, and speculators' configuration.

SGLang, vLLM, TensorRT-LLM and TokenSpeed-side loaders read ``config.json`` with
``LlamaForCausalLMEagle3``, the layer under ``layers.0.`` and a file that is complete: an embedding
and a head that the drafter borrows are written along. Only the EAGLE-3 form fits (q/k/v that read
2H, RoPE, no experts); its low-rank candidate head has no place there and is left out, which changes
no draft law but the cost. What is written can be loaded here again, bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch

from ..config import Eagle4Config
from .checkpoint import cast_floats, check_state, widest
from .conventions import LAYER_IDS
from .dialects import EAGLE3, write_config
from .files import write_files
from .model import Eagle4Drafter
from .speculators import to_speculators

LAYOUTS = ("eagle4", "eagle3", "speculators")
_EAGLE4_ONLY = ("eh_proj", "attn_norm", "use_rope", "candidate_rank", "num_candidates")


def export(
    drafter: Eagle4Drafter,
    path: str | os.PathLike,
    layout: str = "eagle4",
    *,
    dtype: torch.dtype | str | None = None,
    verifier: str | None = None,
) -> None:
    """Write a drafter in one of `LAYOUTS`; ``verifier`` names the target (speculators only).

    Raises `ValueError`, and writes nothing, for a drafter that the layout cannot describe, and for
    one that borrows matrices without being bound to a target.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known; choose one of {list(LAYOUTS)}")
    if layout == "eagle4":
        drafter.save_pretrained(path, dtype=dtype)
        return
    _check_form(drafter.config, layout)
    state = {
        name: value.detach().cpu()
        for name, value in drafter.state_dict().items()
        if not name.startswith("efficient_lm_head")
    }
    state |= _lent(drafter)
    if dtype is not None and dtype != "auto":
        state = cast_floats(state, cast(Any, getattr(torch, str(dtype).removeprefix("torch."))))
    check_state(state, drafter.config.vocab_size)
    name = str(widest(state)).removeprefix("torch.")
    config = (
        eagle3_config(drafter.config, name)
        if layout == "eagle3"
        else to_speculators(drafter.config, name, verifier)
    )
    write_files(Path(path), config, {k: v.contiguous().clone() for k, v in state.items()})


def eagle3_config(config: Eagle4Config, dtype: str) -> dict[str, Any]:
    """``config.json`` of the EAGLE-3 / 3.1 serving layout."""
    written = write_config(config, dtype)
    own = (*_EAGLE4_ONLY, "own_embed_tokens", "own_lm_head", "format_version")
    kept = {key: value for key, value in written.items() if key not in own}
    return {**kept, "architectures": [EAGLE3[0]], LAYER_IDS: list(config.tap_layers)}


def _check_form(config: Eagle4Config, layout: str) -> None:
    wrong = [
        reason
        for is_wrong, reason in (
            (config.eh_proj, "it has eh_proj"),
            (not config.use_rope, "it has no RoPE"),
            (config.num_experts, "it has experts"),
        )
        if is_wrong
    ]
    if wrong:
        raise ValueError(
            f"the layout {layout!r} describes EAGLE-3 drafters, which this one is not: "
            f"{', '.join(wrong)}; write it with layout 'eagle4'"
        )


def _lent(drafter: Eagle4Drafter) -> dict[str, torch.Tensor]:
    """The target's matrices that the file must hold to be complete."""
    found = {}
    for name, is_own in (
        ("embed_tokens", drafter.config.own_embed_tokens),
        ("lm_head", drafter.config.own_lm_head),
    ):
        if not is_own:
            module = drafter.embedding if name == "embed_tokens" else drafter.head
            if getattr(module, "bias", None) is not None:
                raise ValueError(f"the target's {name} has a bias, which EAGLE-3 files cannot hold")
            weight = cast(torch.Tensor, module.weight).detach().cpu()
            found[f"{name}.weight"] = weight.to(drafter.dtype)
    return found
