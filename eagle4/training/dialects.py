"""What a line of a training file may look like.

- ``{"conversations": [{"role", "content"}, ...]}`` or ``{"messages": [...]}`` (OpenAI), the latter
  with an optional ``tools`` list and ``tool_calls`` / ``reasoning_content`` in its turns;
- ``{"conversations": [{"from": "human" | "gpt" | ..., "value"}, ...]}`` (ShareGPT);
- ``{"input_ids": [...], "loss_mask": [...]}``: tokens that someone else has prepared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROLES = {
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"},
    **{"observation": "tool", "function_response": "tool"},
}
# What a chat template may read from a turn beside role and content.
_EXTRAS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")


class Conversation(NamedTuple):
    """Turns as chat templates take them, and the tools that were on offer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None

    def question(self) -> Conversation | None:
        """Everything up to the last turn that an answer may follow; None without one."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] not in ("user", "tool"):
            messages.pop()
        return Conversation(messages, self.tools) if messages else None


class Tokens(NamedTuple):
    """A prepared sequence: ids, and which of them are supervised."""

    ids: list[int]
    mask: list[bool]


def parse_row(row: Any, where: str = "row") -> Conversation | Tokens:
    """The content of one JSON value. Raises `ValueError` for a value in none of the known forms."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if "input_ids" in row:
        return _tokens(row, where)
    turns = row.get("conversations") or row.get("messages")
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"{where}: expected a list under 'conversations' or 'messages', or 'input_ids' with "
            f"'loss_mask'; found the keys {sorted(row)}"
        )
    tools = row.get("tools")
    if isinstance(tools, str):  # some data sets store the list as text
        tools = json.loads(tools)
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{where}: 'tools' must be a list, got {type(tools).__name__}")
    return Conversation([_turn(turn, where) for turn in turns], tools or None)


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: every turn must be an object, got {type(turn).__name__}")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    extras = {key: turn[key] for key in _EXTRAS if turn.get(key) is not None}
    if content is None and extras.get("tool_calls"):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"{where}: every turn needs role/content or from/value strings")
    return {"role": _ROLES.get(role, role), "content": content, **extras}


def _tokens(row: dict[str, Any], where: str) -> Tokens:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise ValueError(f"{where}: 'input_ids' and 'loss_mask' must be lists of one length")
    if any(type(token) is not int or token < 0 for token in ids):
        raise ValueError(f"{where}: 'input_ids' must be token ids")
    if any(value not in (0, 1) for value in mask):
        raise ValueError(f"{where}: 'loss_mask' must hold 0 and 1")
    return Tokens(ids, [bool(value) for value in mask])


def read_files(
    paths: Sequence[str | os.PathLike],
) -> Iterator[tuple[str, str, Conversation | Tokens]]:
    """``(file stem, FILE:LINE, content)`` of jsonl files in order. Raises `ValueError`."""
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"{path} is not a file; give JSON lines with conversations")
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    try:
                        row = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise ValueError(f"{where}: not JSON ({error})") from error
                    yield path.stem, where, parse_row(row, where)
