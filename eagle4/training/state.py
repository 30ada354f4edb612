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

from .runs import Position

FILE = "training_state.safetensors"
# changing these on resume is harmless: they say when to stop and look, not what a step does
_FREE = ("steps", "max_minutes", "eval_every", "eval_runs", "eval_depths", "checkpoint_every")


class TrainState(NamedTuple):
    """Everything about a run that is not a tensor."""

    step: int = 0
    position: Position = Position(0, 0)
    seconds: float = 0.0
    skipped: int = 0
    best_tau: float = 0.0


def _fingerprint(config) -> dict:
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    return {key: value for key, value in values.items() if key not in _FREE}


def save_state(
    folder: Path,
    state: TrainState,
    params: Mapping[str, torch.Tensor],
    ema: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    config,
) -> None:
    """Write weights, average, optimiser moments and ``state``."""
    tensors = {f"param.{n}": p.detach() for n, p in params.items()}
    tensors |= {f"ema.{n}": p for n, p in ema.items()}
    names = {id(p): n for n, p in params.items()}
    for param, moments in optimizer.state.items():
        for key, value in moments.items():
            tensors[f"optim.{key}.{names[id(param)]}"] = torch.as_tensor(value)
    meta = {"state": json.dumps(state._asdict()), "config": json.dumps(_fingerprint(config))}
    scratch = folder / (FILE + ".tmp")
    save_file({key: value.contiguous() for key, value in tensors.items()}, scratch, metadata=meta)
    os.replace(scratch, folder / FILE)


def load_state(
    folder: Path,
    params: Mapping[str, torch.Tensor],
    ema: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    config,
) -> TrainState | None:
    """Fill everything in place; None without a checkpoint.

    Raises `ValueError` when the checkpoint was made with other settings or parameters.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
        _check(json.loads(meta["config"]), _fingerprint(config), path)
        for key in file.keys():
            kind, _, rest = key.partition(".")
            moment, _, optim_name = rest.partition(".")
            name = optim_name if kind == "optim" else rest
            if name not in params:
                raise ValueError(f"{path} holds {key}, which this drafter does not have")
            # a copy: the file is memory-mapped and will be replaced
            value = file.get_tensor(key).clone()
            if kind == "optim":
                optimizer.state[params[name]][moment] = value
            else:
                with torch.no_grad():
                    (params if kind == "param" else ema)[name].copy_(value)
    fields = json.loads(meta["state"])
    return TrainState(**{**fields, "position": Position(*fields["position"])})


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
