"""Drafters on disk: read in every dialect, written in the EAGLE-4 serving layout.

Nothing is guessed while loading. Every tensor must be there, under its name, in its shape, finite;
what does not fit is reported together, by the names in the file. Only the embedding and a full LM
head may be absent: then the target lends them (see `dialects`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from .conventions import NormOutputMeans, TapConvention
from .dialects import file_name, layer_prefix, read_config, write_config
from .files import CONFIG, read_json, read_tensors, resolve_folder, write_files
from .model import Eagle4Drafter
from .speculators import from_speculators, is_speculators

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(
    path: str | os.PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    revision: str | None = None,
    target_config: PreTrainedConfig | None = None,
    tap_convention: TapConvention | None = None,
    norm_output_means: NormOutputMeans | None = None,
) -> Eagle4Drafter:
    """A drafter in eval mode from a folder or a hub id; only safetensors are read.

    ``dtype`` None or ``"auto"`` keeps the file's (the widest when it mixes several).
    ``target_config`` gives the depth of the target where the file does not; ``tap_convention`` and
    ``norm_output_means`` settle what foreign files leave open (see `conventions`). Raises
    `ValueError` that names the file and everything in it that does not fit.
    """
    folder = resolve_folder(path, revision)
    raw, tensors = read_json(folder / CONFIG), read_tensors(folder)
    try:
        config = read_config(
            *(from_speculators(raw) if is_speculators(raw) else raw, tensors),
            target_config=target_config,
            tap_convention=tap_convention,
            norm_output_means=norm_output_means,
        )
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    try:
        # On the meta device nothing is allocated before the shapes are known to fit.
        with torch.device("meta"):
            drafter = Eagle4Drafter(config)
        state = _fitting(drafter.state_dict(), tensors)
        state = cast_floats(state, _as_dtype(dtype) or widest(state))
        check_state(state, config.vocab_size)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    drafter.load_state_dict(state, strict=True, assign=True)
    drafter.config.name_or_path = str(path)
    return drafter.to("cpu" if device is None else device).eval()  # pyright: ignore


def save(
    drafter: Eagle4Drafter, path: str | os.PathLike, *, dtype: torch.dtype | str | None = None
) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the EAGLE-4 serving layout.

    Weights keep their bits unless ``dtype`` casts them. Each file is replaced as a whole. Raises
    `ValueError`, and writes nothing, for weights that could not be loaded again.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder")
    state = {name: value.detach().cpu() for name, value in drafter.state_dict().items()}
    if (cast := _as_dtype(dtype)) is not None:
        state = cast_floats(state, cast)
    check_state(state, drafter.config.vocab_size)
    name = str(widest(state)).removeprefix("torch.")
    # Cloned: safetensors refuses tensors that share memory.
    tensors = {key: value.contiguous().clone() for key, value in state.items()}
    write_files(folder, write_config(drafter.config, name), tensors)


def cast_floats(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same tensors with the floating-point ones in ``dtype``."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}


def _fitting(
    wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``found`` under our names, or an error that lists everything that does not fit."""
    prefix = layer_prefix(found)
    names = {name: file_name(name, prefix) for name in wanted}
    wrong = [
        f"{file} has shape {list(found[file].shape)} instead of {list(wanted[name].shape)}"
        for name, file in names.items()
        if file in found and found[file].shape != wanted[name].shape
    ]
    wrong += [
        f"{file} is {found[file].dtype} instead of {_kind(wanted[name])}"
        for name, file in names.items()
        if file in found and not _is_readable(found[file], wanted[name])
    ]
    missing = sorted(set(names.values()) - set(found))
    unknown = sorted(set(found) - set(names.values()))
    if missing or unknown or wrong:
        raise ValueError(
            f"the weights do not fit the configuration: missing {missing}; unknown {unknown}; "
            f"wrong {wrong}"
        )
    return {name: found[file] for name, file in names.items()}


def _is_readable(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if wanted.is_floating_point():
        return found.dtype in _FLOATS
    return found.dtype == wanted.dtype


def _kind(wanted: torch.Tensor) -> str:
    return "a 16, 32 or 64 bit float" if wanted.is_floating_point() else str(wanted.dtype)


def check_state(state: Mapping[str, torch.Tensor], vocab_size: int) -> None:
    """Raises `ValueError` for non-finite values and impossible vocabulary maps."""
    bad = [k for k, v in state.items() if v.is_floating_point() and not v.isfinite().all()]
    if bad:
        raise ValueError(f"non-finite values in {bad}")
    if "d2t" in state:
        check_vocabulary_map(state["d2t"], state["t2d"], vocab_size)


def check_vocabulary_map(d2t: torch.Tensor, t2d: torch.Tensor, vocab_size: int) -> None:
    """Check offsets ``d2t`` (target id = draft id + offset) and the mask ``t2d`` of reached ids.

    Raises `ValueError` for ids out of range, ids reached twice, or a mask that says otherwise.
    """
    target_ids = torch.arange(len(d2t), device="cpu") + d2t.cpu()
    outside = ((target_ids < 0) | (target_ids >= vocab_size)).nonzero().flatten().tolist()
    if outside:
        raise ValueError(
            f"d2t sends draft ids {outside[:5]} outside the target's {vocab_size} tokens; it holds "
            "offsets (target id - draft id), not target ids"
        )
    count = torch.bincount(target_ids, minlength=vocab_size)
    if twice := (count > 1).nonzero().flatten().tolist():
        raise ValueError(f"d2t reaches target ids {twice[:5]} more than once")
    if differ := (count.bool() != t2d.cpu()).nonzero().flatten().tolist():
        raise ValueError(f"d2t and t2d disagree about target ids {differ[:5]}")


def widest(state: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The floating-point type that holds every tensor."""
    widest = state["fc.weight"].dtype
    for value in state.values():
        if value.is_floating_point():
            widest = torch.promote_types(widest, value.dtype)
    return widest


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in _FLOATS:
        raise ValueError(f"dtype {dtype!r} must be one of {[str(d) for d in _FLOATS]} or 'auto'")
    return found
