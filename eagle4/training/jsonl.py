"""Files of JSON lines that grow row by row and survive a crash in the middle of a row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def append_row(path: str | os.PathLike, row: dict[str, Any]) -> None:
    """Add one row; one write, so a crash can only cut the last line, which nobody reads."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(json.dumps(row).encode() + b"\n")


def read_rows(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Complete rows of a file; none if it does not exist."""
    path = Path(path)
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)


def drop_cut_line(path: str | os.PathLike) -> None:
    """Remove what a crash left of a row, so that the next row starts on its own line."""
    path = Path(path)
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
