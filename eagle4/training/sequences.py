"""The sequences that a drafter is trained on: ids, and which of them are supervised.

A response file holds two kinds of rows: the target's own answers (``prompt_ids``, ``response_ids``,
see `answers`), and sequences that were kept as they came, from conversations whose answers are to
be learned or from prepared tokens (``input_ids``, ``mask_runs``: lengths of alternating runs, the
first one unsupervised).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .dialects import Tokens, read_files
from .jsonl import append_row, drop_cut_line, read_rows
from .templates import supervised


def keep_answers(
    files: Sequence[str | os.PathLike],
    tokenizer: Any,
    path: str | os.PathLike,
    ends: Collection[int],
    vocab_size: int,
) -> int:
    """Append the conversations' own answers and prepared tokens to a response file.

    Returns rows added; rows that are there are skipped. Raises `ValueError` for ids that the target
    does not know and for masks that do not decode to the answers.
    """
    drop_cut_line(path)
    done, added = {row["id"] for row in read_rows(path)}, 0
    for kind, where, content in read_files(files):
        is_prepared = isinstance(content, Tokens)
        for tokens in [content] if is_prepared else supervised(tokenizer, content, ends, where):
            if max(tokens.ids, default=0) >= vocab_size:
                raise ValueError(f"{where}: token {max(tokens.ids)} is outside the vocabulary")
            name = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
            if name not in done and any(tokens.mask):
                runs = mask_to_runs(tokens.mask)
                append_row(
                    path, {"id": name, "input_ids": tokens.ids, "mask_runs": runs, "kind": kind}
                )
                done.add(name)
                added += 1
    return added


def mask_to_runs(mask: Sequence[bool]) -> list[int]:
    """Lengths of alternating runs; the first one is of False and may be empty."""
    runs = [(value, len(list(group))) for value, group in itertools.groupby(mask)]
    lengths = [length for _, length in runs]
    return [0, *lengths] if runs and runs[0][0] else lengths


def runs_to_mask(runs: Sequence[int]) -> list[bool]:
    """The inverse of `mask_to_runs`."""
    return [bool(i % 2) for i, length in enumerate(runs) for _ in range(length)]


def training_sequences(
    path: str | os.PathLike, min_response_tokens: int = 4, max_tokens: int = 4096
) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """``(ids, mask, info)`` of a response file, as `extract.build_store` takes them.

    Longer sequences are cut; those with too few supervised tokens are left out.
    """
    for row in read_rows(Path(path)):
        if "input_ids" in row:
            ids, mask = row["input_ids"], runs_to_mask(row["mask_runs"])
        else:
            ids = row["prompt_ids"] + row["response_ids"]
            mask = runs_to_mask([len(row["prompt_ids"]), len(row["response_ids"])])
        if sum(mask[:max_tokens]) >= min_response_tokens:
            info = {key: row.get(key) for key in ("id", "kind", "temperature")}
            yield torch.tensor(ids[:max_tokens]), torch.tensor(mask[:max_tokens]), info
