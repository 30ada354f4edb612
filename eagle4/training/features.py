"""The feature store: what the target computed, on disk, so that training never runs the target.

Per sequence of n tokens: ``ids [n]``, ``taps [n-1, T, H]`` (outputs of the tapped blocks, after the
block), ``last [n-1, H]`` (after the final norm: the LM head's input), ``mask [n]`` (tokens whose
prediction is supervised). The last token needs no features: nothing follows it.

A store is a folder of ``shard-NNNNN.safetensors`` and a ``manifest.json`` that names the target.
Shards are memory-mapped when read and replaced atomically when written; the manifest is written
after the shard that it counts, so an interrupted writer continues where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

FORMAT_VERSION = 1
TAP_CONVENTION = "post_block"


class FeatureSequence(NamedTuple):
    """One sequence of the store."""

    ids: torch.Tensor  # int32 [n]
    taps: torch.Tensor  # bfloat16 [n-1, T, H]
    last: torch.Tensor  # bfloat16 [n-1, H]
    mask: torch.Tensor  # bool [n]


def target_identity(
    target_config: PreTrainedConfig, tap_layers: Sequence[int], fingerprint: str | None
) -> dict[str, Any]:
    """What a store and a drafter must agree on."""
    text = target_config.get_text_config(decoder=True)
    return {
        "model_type": text.model_type,
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "tap_layers": list(tap_layers),
        "tap_convention": TAP_CONVENTION,
        "tokenizer_fingerprint": fingerprint,
    }


def check_identity(found: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises `ValueError` naming every field on which a store and the caller disagree."""
    wrong = [
        f"{key}: store has {found.get(key)!r}, this run needs {value!r}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if wrong:
        raise ValueError(
            f"the feature store {where} was made for another target ({'; '.join(wrong)}); "
            "extract features again into a new folder"
        )


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text)
    os.replace(scratch, path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises `ValueError` when there is no manifest or a newer format."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a feature store: it has no manifest.json")
    manifest = json.loads(path.read_text())
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has feature-store format {version}; this library reads {FORMAT_VERSION}"
        )
    return manifest


class FeatureWriter:
    """Appends sequences; `flush` (or leaving a ``with`` block) writes the unfinished shard.

    Opening an existing folder continues it after checking that it belongs to the same target.
    """

    def __init__(self, folder: str | os.PathLike, identity: dict[str, Any], shard_size: int = 64):
        self.folder, self.shard_size = Path(folder), shard_size
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pending: list[FeatureSequence] = []
        self._info: list[dict[str, Any]] = []
        self._dropped = 0
        if (self.folder / "manifest.json").exists():
            self.manifest = read_manifest(self.folder)
            check_identity(self.manifest["target"], identity, str(self.folder))
        else:
            self.manifest = {
                "format_version": FORMAT_VERSION,
                "target": identity,
                "shards": [],
                "num_sequences": 0,
                "num_tokens": 0,
                "num_supervised": 0,
                "num_dropped": 0,
            }

    @property
    def num_done(self) -> int:
        """Sequences that are safely on disk or were dropped before those."""
        return self.manifest["num_sequences"] + self.manifest["num_dropped"]

    def drop(self) -> None:
        """Count a sequence that is left out, so that a resumed run stays aligned."""
        self._dropped += 1

    def add(self, sequence: FeatureSequence, info: dict[str, Any] | None = None) -> None:
        """Raises `ValueError` for lengths that do not fit together or an empty mask."""
        n = len(sequence.ids)
        lengths = len(sequence.taps), len(sequence.last), len(sequence.mask)
        if lengths != (n - 1, n - 1, n):
            raise ValueError(
                f"a sequence of {n} tokens needs {n - 1} taps, {n - 1} last states and {n} mask "
                f"entries, got {lengths}"
            )
        if not sequence.mask.any():
            raise ValueError("a sequence without a supervised token teaches nothing; leave it out")
        self._pending.append(sequence)
        self._info.append(info or {})
        if len(self._pending) >= self.shard_size:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        name = f"shard-{len(self.manifest['shards']):05d}.safetensors"
        tensors = {
            f"{i}.{field}": value.contiguous()
            for i, sequence in enumerate(self._pending)
            for field, value in sequence._asdict().items()
        }
        scratch = self.folder / (name + ".tmp")
        save_file(tensors, scratch, metadata={"info": json.dumps(self._info)})
        os.replace(scratch, self.folder / name)
        self.manifest["shards"].append({"file": name, "num_sequences": len(self._pending)})
        self.manifest["num_sequences"] += len(self._pending)
        self.manifest["num_tokens"] += sum(len(s.ids) for s in self._pending)
        self.manifest["num_supervised"] += sum(int(s.mask.sum()) for s in self._pending)
        self.manifest["num_dropped"] += self._dropped
        write_atomically(self.folder / "manifest.json", json.dumps(self.manifest, indent=1))
        self._pending, self._info, self._dropped = [], [], 0

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.flush()


class FeatureStore:
    """Read-only, memory-mapped view of stores, one after the other: ``len(store)``, ``store[i]``.

    ``expect``: an identity from `target_identity`; raises `ValueError` if a store is another's, or
    if the stores are of different targets. ``manifest`` is that of all of them together.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *more: str | os.PathLike,
        expect: dict[str, Any] | None = None,
    ):
        folders = [Path(folder), *map(Path, more)]
        manifests = [read_manifest(path) for path in folders]
        wanted = manifests[0]["target"] if expect is None else expect
        for path, manifest in zip(folders, manifests, strict=True):
            check_identity(manifest["target"], wanted, str(path))
        self.folder = folders[0]
        counts = [name for name in manifests[0] if name.startswith("num_")]
        self.manifest = {**manifests[0], **{n: sum(m[n] for m in manifests) for n in counts}}
        self._where = [
            (path / shard["file"], i)
            for path, manifest in zip(folders, manifests, strict=True)
            for shard in manifest["shards"]
            for i in range(shard["num_sequences"])
        ]
        if not self._where:
            names = ", ".join(map(str, folders))
            raise ValueError(f"the feature store {names} holds no sequences")
        self._open: dict[Path, Any] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> FeatureSequence:
        return FeatureSequence(*(self.field(index, name) for name in FeatureSequence._fields))

    def field(self, index: int, name: str) -> torch.Tensor:
        """One tensor of one sequence, without touching the others."""
        file, i = self._where[index]
        return self._shard(file).get_tensor(f"{i}.{name}")

    def info(self, index: int) -> dict[str, Any]:
        """What the writer noted about a sequence."""
        file, i = self._where[index]
        return json.loads(self._shard(file).metadata()["info"])[i]

    def _shard(self, path: Path):
        if path not in self._open:
            if not path.is_file():
                raise ValueError(f"{path} is named in the manifest but missing")
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        return self._open[path]
