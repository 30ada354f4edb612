"""What a harness has measured and learned, as a file: refused elsewhere, rebuilt when broken.

JSON with a format number, the cost table (units and fingerprint inside) and the calibrations.
Written to a neighbour and renamed, so a reader never meets half a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .acceptance import Experience
from .cost import CostTable

FORMAT = 1

logger = logging.getLogger("eagle4")


class ForeignProfile(ValueError):
    """The file was measured on another setup."""


def file_name(fingerprint: Mapping[str, Any]) -> str:
    """A name that only this fingerprint has."""
    text = json.dumps(fingerprint, sort_keys=True)
    return f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def write(path: Path, table: CostTable, experience: Experience) -> None:
    """Write atomically. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "cost": table.to_dict(), "experience": experience.to_dict()}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(
    path: Path, fingerprint: Mapping[str, Any] | None = None, *, frozen: bool = False
) -> tuple[CostTable, Experience]:
    """The table and the experience in a file.

    With ``fingerprint`` a table of another setup is refused with `ForeignProfile`, which names what
    differs. Raises `ValueError` for a file that is no profile and `OSError` when it cannot be read.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r} instead of {FORMAT}")
        table = CostTable.from_dict(record["cost"], frozen=frozen)
        experience = Experience.from_dict(record["experience"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path.name} is not a usable harness profile: {error!r}") from error
    if fingerprint is not None:
        _check(path, table.fingerprint, dict(fingerprint))
    return table, experience


def read_or_none(path: Path, fingerprint: Mapping[str, Any]) -> tuple[CostTable, Experience] | None:
    """As `read`; None, with a warning, when the file is missing, broken or from elsewhere."""
    if not path.is_file():
        return None
    try:
        return read(path, fingerprint)
    except (ValueError, OSError) as error:
        logger.warning("the harness profile is measured again: %s", error)
        return None


def _check(path: Path, found: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    different = sorted(key for key in found.keys() | here.keys() if found.get(key) != here.get(key))
    if different:
        details = "; ".join(f"{k}: {found.get(k)!r} there, {here.get(k)!r} here" for k in different)
        raise ForeignProfile(
            f"{path.name} was measured on another setup ({details}); run `eagle4 profile` here"
        )
