"""Folders of drafter files: safetensors only, whole files only, every error names its file.

Pickle files (``pytorch_model.bin``) run code when they are read and are never opened. Files are
written next to their place and moved over it, so a crash leaves the old file or the new one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_folder(path: str | os.PathLike, revision: str | None = None) -> Path:
    """The local folder of a path or of a hub id (``owner/name``), downloaded if need be."""
    folder = Path(path)
    # The empty path would be the working directory, which nobody meant.
    if os.fspath(path) and folder.is_dir():
        return folder
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the folder that holds it and {CONFIG}")
    if not _HUB_ID.fullmatch(os.fspath(path)):
        raise ValueError(f"{path} is neither a folder nor a hub id such as owner/name")
    try:
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(os.fspath(path), revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a folder here, and the hub does not give it: {error}. Check the "
            "spelling and the connection, or give the path of a downloaded folder"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's ``model.safetensors`` or of its sharded index, on the CPU."""
    if (folder / WEIGHTS).is_file():
        return _read_one(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _read_sharded(folder)
    found = sorted(file for file in folder.glob("*.safetensors"))
    if len(found) == 1:
        return _read_one(found[0])
    if found:
        raise ValueError(
            f"{folder} holds {[f.name for f in found]} but neither {WEIGHTS} nor an {INDEX}"
        )
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
    seen = f" {pickles} would run code when read and is refused." if pickles else ""
    raise ValueError(
        f"{folder} holds no safetensors file.{seen} Convert pickle weights where you trust them: "
        'safetensors.torch.save_file(torch.load("pytorch_model.bin", weights_only=True), '
        f'"{WEIGHTS}")'
    )


def write_files(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``; both are whole before either is placed."""
    folder.mkdir(parents=True, exist_ok=True)
    pending = {name: folder / f".{name}.{os.getpid()}.tmp" for name in (WEIGHTS, CONFIG)}
    try:
        text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n"
        pending[CONFIG].write_text(text, encoding="utf-8")
        save_file(tensors, pending[WEIGHTS], metadata={"format": "pt"})
        # safetensors makes private files; take over what the user's umask gave the other one.
        pending[WEIGHTS].chmod(pending[CONFIG].stat().st_mode)
        for file in pending.values():
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        for name, file in pending.items():
            os.replace(file, folder / name)
    finally:
        for file in pending.values():
            file.unlink(missing_ok=True)


def _read_one(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            # Cloned: a view of the mapped file would follow, or crash on, later changes of it.
            return {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}); download or save it again"
        ) from error


def _read_sharded(folder: Path) -> dict[str, torch.Tensor]:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensor names to file names")
    shards = sorted(set(places.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX} names {shard!r}, which is no file of its folder")
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard} is missing; {INDEX} names it")
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        part = _read_one(folder / shard)
        listed = {name for name, place in places.items() if place == shard}
        if set(part) != listed:
            raise ValueError(
                f"{folder / shard} and {INDEX} disagree about {sorted(set(part) ^ listed)}"
            )
        tensors.update(part)
    return tensors
