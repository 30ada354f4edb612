"""Prompts: what the target is asked, from files or written by the target itself.

Given the chat template up to the user's content, an instruction-tuned model writes a plausible user
turn (Magpie's observation, Xu et al. 2024). A starter phrase in front steers the topic. Turn number
i of a seed is drawn with its own noise, so other seeds give other turns and an interrupted run
continues with the turn that it had not written.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from ..engine.continuous import Job, Sampling, answer_all
from ..target import TargetAdapter
from .dialects import Conversation, read_files
from .jsonl import append_row, drop_cut_line, read_rows
from .templates import encode, render

_MARK = "\u2042user-content\u2042"
# Temperature 1 from the likely part of the law: the tail of a small model is no user.
TURN_SAMPLING = Sampling(temperature=1.0, top_k=256, top_p=0.95)


class Prompt(NamedTuple):
    """Token ids that the target will answer, with a stable id."""

    id: str
    ids: list[int]
    kind: str


def make_prompt(tokenizer: Any, conversation: Conversation, kind: str) -> Prompt | None:
    """The conversation up to its last user turn; None without one."""
    question = conversation.question()
    if question is None:
        return None
    ids = encode(tokenizer, render(tokenizer, question, is_prompt=True))
    return Prompt(hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16], ids, kind)


def read_prompts(
    paths: Sequence[str | os.PathLike], tokenizer: Any, max_prompt_tokens: int = 1024
) -> Iterator[Prompt]:
    """Prompts of jsonl files in order; longer ones are left out. Ids hash the prompt's tokens.

    Raises `ValueError` for a row without a user turn.
    """
    for kind, where, content in read_files(paths):
        if isinstance(content, Conversation):
            prompt = make_prompt(tokenizer, content, kind)
            if prompt is None:
                raise ValueError(f"{where}: no user turn to answer")
            if len(prompt.ids) <= max_prompt_tokens:
                yield prompt


def user_header(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to the user's content. Raises `ValueError`."""
    message = {"role": "user", "content": _MARK}
    text = render(tokenizer, Conversation([message]), is_prompt=True)
    if text.count(_MARK) != 1:
        raise ValueError(
            "the chat template changes or repeats the user's content; give prompts in a file"
        )
    return encode(tokenizer, text.split(_MARK)[0])


def synthesize_prompts(
    target: TargetAdapter,
    tokenizer: Any,
    count: int,
    path: str | os.PathLike,
    *,
    ends: Sequence[int],
    starters: Sequence[str] = ("",),
    num_rows: int = 96,
    max_new_tokens: int = 96,
    seed: int = 0,
) -> list[Prompt]:
    """User turns ``0..count - 1`` of a seed, kept in a jsonl file that a later call continues.

    A turn that does not end by itself is cut at ``max_new_tokens``; empty ones are left out. Of a
    split target rank 0 calls this and the others `answer_all`.
    """
    head = user_header(tokenizer)
    drop_cut_line(path)
    found = {row["id"]: row["content"] for row in read_rows(path)}
    begun: dict[str, str] = {}
    jobs = []
    for i in range(count):
        name = f"{seed}/{i}"
        begun[name] = random.Random(f"starter/{name}").choice(list(starters))
        if name not in found:
            ids = head + encode(tokenizer, begun[name])
            noise = random.Random(f"turn/{name}").getrandbits(62)
            jobs.append(Job(name, ids, max_new_tokens, TURN_SAMPLING, noise))
    capacity = max_new_tokens + max((len(job.ids) for job in jobs), default=1)
    written = answer_all(target, jobs, ends=ends, num_rows=num_rows, capacity=capacity)
    for job, answer in tqdm(written, total=len(jobs), desc="user turns", mininterval=5):
        text = tokenizer.decode(encode(tokenizer, begun[job.id]) + answer, skip_special_tokens=True)
        found[job.id] = text.strip()
        append_row(path, {"id": job.id, "content": found[job.id]})
    wanted = [found[name] for name in begun if found[name]]
    return [_user_turn(tokenizer, content) for content in wanted]


def _user_turn(tokenizer: Any, content: str) -> Prompt:
    prompt = make_prompt(
        tokenizer, Conversation([{"role": "user", "content": content}]), "synthetic"
    )
    assert prompt is not None, "a user turn is a question"
    return prompt


def read_starters(path: str | os.PathLike) -> list[str]:
    """One phrase per line; an empty line is the bare header. Raises `ValueError` without any."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    if not lines:
        raise ValueError(f"{path} holds no starter phrase; an empty line is the bare header")
    return lines
