"""Training checkpoints: one safetensors file, replaced atomically, that resumes bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .distributed import full, like
from .runs import Position

FILE = "training_state.safetensors"
# changing these on resume is harmless: they say when to stop and look, not what a step does
_FREE = (
    *("steps", "max_minutes", "eval_every", "eval_runs", "eval_depths", "checkpoint_every"),
    *("decode_prompts", "decode_tokens", "trackers"),
)


class TrainState(NamedTuple):
    """Everything about a run that is not a tensor."""

    step: int = 0
    position: Position = Position(0, 0)
    seconds: float = 0.0
    skipped: int = 0
    best: float = 0.0  # the longest accept length so far
    kept: int = -1  # step of the checkpoint in "best"; -1: an older version kept it
    overlap: tuple[float, ...] = ()  # mean acceptance chance of the last step, by depth


def _fingerprint(config) -> dict:
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    return {key: value for key, value in values.items() if key not in _FREE}


def save_state(
    folder: Path,
    state: TrainState,
    params: Mapping[str, torch.Tensor],
    ema: Mapping[str, torch.Tensor],
    extra: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    config,
    is_main: bool = True,
) -> None:
    """Write weights, average, other state and optimiser moments, whole whatever was sharded."""
    tensors = {f"param.{n}": p.detach() for n, p in params.items()}
    tensors |= {f"ema.{n}": p for n, p in ema.items()}
    tensors |= {f"extra.{n}": p for n, p in extra.items()}
    names = {id(p): n for n, p in params.items()}
    for param, moments in optimizer.state.items():
        for key, value in moments.items():
            tensors[f"optim.{key}.{names[id(param)]}"] = torch.as_tensor(value)
    tensors = {key: full(value).cpu().contiguous() for key, value in tensors.items()}
    if not is_main:
        return
    meta = {"state": json.dumps(state._asdict()), "config": json.dumps(_fingerprint(config))}
    scratch = folder / (FILE + ".tmp")
    save_file(tensors, scratch, metadata=meta)
    os.replace(scratch, folder / FILE)


def load_state(
    folder: Path,
    params: Mapping[str, torch.Tensor],
    ema: Mapping[str, torch.Tensor],
    extra: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    config,
) -> TrainState | None:
    """Fill everything in place; None without a checkpoint.

    Raises `ValueError` when the checkpoint was made with other settings or parameters.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    places = {"param": params, "ema": ema, "extra": extra}
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
        # a setting that is younger than the file has its default there
        found = {**_fingerprint(type(config)()), **json.loads(meta["config"])}
        _check(found, _fingerprint(config), path)
        _check_names(file.keys(), params, extra, path)
        for key in file.keys():
            kind, _, rest = key.partition(".")
            # a copy: the file is memory-mapped and will be replaced
            value = file.get_tensor(key).clone()
            if kind == "optim":
                moment, _, name = rest.partition(".")
                owner = params[name]
                is_whole = value.shape == owner.shape
                value = value.to(owner.device) if value.ndim else value
                optimizer.state[owner][moment] = like(value, owner) if is_whole else value
            else:
                with torch.no_grad():
                    places[kind][rest].copy_(like(value, places[kind][rest]))
    fields = json.loads(meta["state"])
    fields["position"] = Position(*fields["position"])
    return TrainState(**{**fields, "overlap": tuple(fields.get("overlap", ()))})


def _check_names(found, params, extra, path: Path) -> None:
    wanted = {f"{kind}.{name}" for name in params for kind in ("param", "ema")}
    wanted |= {f"extra.{name}" for name in extra}
    plain = {key for key in found if not key.startswith("optim.")}
    foreign = [key for key in found if key.startswith("optim.")]
    unknown = sorted(plain - wanted) + [k for k in foreign if k.split(".", 2)[2] not in params]
    if unknown or wanted - plain:
        raise ValueError(
            f"{path} is of another drafter: it holds {unknown} and lacks {sorted(wanted - plain)}"
        )


def _check(found: dict, wanted: dict, path: Path) -> None:
    changed = [
        f"{key}: {found.get(key)!r} -> {wanted.get(key)!r}"
        for key in sorted(set(found) | set(wanted))
        if found.get(key) != wanted.get(key)
    ]
    if changed:
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(changed)}); "
            "use the same settings or a new folder"
        )
