"""What a data folder was made from and what is in it: ``manifest.json`` next to the responses.

``made_by`` must not change between calls that add to one folder: answers of another target, under
another template or in another style would be mixed into it (trap J11). The statistics say whether
the loss mask covers what it should (J7): how many answers of every kind, how long, how many reached
their end of turn, and what share of all tokens is supervised.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..parallel import Ranks
from .features import write_atomically
from .sequences import training_sequences

FILE = "manifest.json"
_NOT_IDENTITY = ("name", "revision", "dtype", "weights")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_fingerprint(model: nn.Module, ranks: Ranks | None = None) -> str:
    """sha256 over a sum of every parameter's bits: tells fine-tunes of one architecture apart.

    The sums of shares add up, so a model that ``ranks`` share has the fingerprint of the whole; all
    of them ask.
    """
    own = {
        name.replace(".inner.", "."): int(param.detach().view(_BITS[param.element_size()]).sum())
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    parts = [own] if ranks is None else ranks.gather_objects(own)
    # What several ranks hold alike counts once: parameters that stay whole, repeated heads.
    sums = {name: sum({part[name] for part in parts}) % 2**64 for name in sorted(own)}
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]


def made_by(
    target: Any,
    identity: dict[str, Any],
    template: str | None,
    settings: dict,
    ranks: Ranks | None = None,
) -> dict:
    """The part of a manifest that a later call must repeat; all ``ranks`` of a target ask."""
    return {
        "target": {
            **identity,
            "name": getattr(target.config, "_name_or_path", "") or None,
            "revision": getattr(target.config, "_commit_hash", None),
            "dtype": str(next(target.parameters()).dtype).removeprefix("torch."),
            "weights": weights_fingerprint(target, ranks),
        },
        "template": template,
        "settings": settings,
    }


def check_made_by(folder: Path, wanted: dict[str, Any]) -> None:
    """Raises `ValueError` naming what differs from an earlier call; writes it at the first one."""
    path = folder / FILE
    wanted = json.loads(json.dumps(wanted))
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"made_by": wanted}, indent=1))
        return
    found = json.loads(path.read_text()).get("made_by", {})
    changed = [
        f"{part}.{key}: {_get(found, part, key)!r} -> {_get(wanted, part, key)!r}"
        for part in ("target", "template", "settings")
        for key in sorted({*_keys(found, part), *_keys(wanted, part)})
        if _get(found, part, key) != _get(wanted, part, key) and key != "name"
    ]
    if changed:
        raise ValueError(
            f"{folder} was made differently ({'; '.join(changed)}); repeat the settings or take a "
            "new folder"
        )


def read_identity(folder: Path) -> dict[str, Any]:
    """What the folder's target was, as `features.target_identity` gives it.

    Raises `ValueError` for a folder that `eagle4 data` did not write.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing; write the folder with `eagle4 data`")
    target = json.loads(path.read_text())["made_by"]["target"]
    return {key: target[key] for key in target if key not in _NOT_IDENTITY}


def _keys(found: dict[str, Any], part: str) -> list[str]:
    value = found.get(part)
    return list(value) if isinstance(value, dict) else [""]


def _get(found: dict[str, Any], part: str, key: str) -> Any:
    value = found.get(part)
    return value.get(key) if isinstance(value, dict) else value


def add_statistics(folder: Path, responses: Path, ends: Collection[int]) -> dict[str, Any]:
    """Count what the response file holds, write it into the manifest and return it."""
    rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for ids, mask, info in training_sequences(responses):
        row = rows[info["kind"] or "unknown"]
        row["sequences"] += 1
        row["tokens"] += len(ids)
        row["supervised"] += int(mask.sum())
        last = int(ids[mask.nonzero()[-1, 0]]) if mask.any() else -1
        row["ended"] += last in ends
    kinds = {kind: dict(row) for kind, row in sorted(rows.items())}
    total = {
        key: sum(row[key] for row in kinds.values())
        for key in ("sequences", "tokens", "supervised", "ended")
    }
    share = round(total["supervised"] / max(1, total["tokens"]), 4)
    statistics = {**total, "supervised_share": share, "kinds": kinds}
    manifest = json.loads((folder / FILE).read_text())
    write_atomically(folder / FILE, json.dumps({**manifest, "statistics": statistics}, indent=1))
    return statistics


def describe(statistics: dict[str, Any]) -> str:
    """One line for people."""
    return (
        f"{statistics['sequences']} sequences, {statistics['tokens']} tokens, "
        f"{100 * statistics['supervised_share']:.0f} % supervised, {statistics['ended']} ended"
    )
