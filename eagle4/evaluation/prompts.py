"""Prompt files: one small noun, `Prompt`, whatever the file looks like.

Understood, one JSON object per line: ``{question_id, category, turns}`` (the FastChat form of
MT-Bench), ``{id, conversations}`` or ``{id, messages}`` with ``role``/``content`` or ShareGPT's
``from``/``value``, and ``{prompt}``. A ``.txt`` file has one prompt per line. Recorded answers are
dropped: the models under test answer themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Message = dict[str, str]
Device = str | torch.device


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """User turns of one conversation, answered one after the other."""

    prompt_id: str
    turns: tuple[str, ...]
    category: str = "all"
    system: str | None = None


BUILT_IN = tuple(
    Prompt(prompt_id=f"built-in-{number}", turns=(text,), category="built-in")
    for number, text in enumerate(
        (
            "Explain in a few sentences why the sky is blue.",
            "Write a short email that asks a colleague to review a report by Friday.",
            "Write a Python function that returns the n-th Fibonacci number, and explain it.",
            "List five tips for sleeping better, one sentence each.",
        ),
        start=1,
    )
)


def load_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt file; ``limit`` keeps the first prompts.

    Raises `ValueError` that names the line for a row that is not understood, and for an empty file.
    """
    path = Path(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            prompts.append(Prompt(prompt_id=str(number), turns=(line.strip(),)))
        else:
            prompts.append(_parse(line, f"{path.name}:{number}", number))
        if limit is not None and len(prompts) >= limit:
            break
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


@dataclass(kw_only=True)
class Turn:
    """One turn of a batch of conversations. The reader sets ``answers``: token ids per row."""

    prompts: Sequence[Prompt]
    number: int
    inputs: dict[str, torch.Tensor]
    answers: list[list[int]] | None = None

    @property
    def context(self) -> int:
        return self.inputs["input_ids"].shape[1]

    def prefix(self, row: int) -> list[int]:
        """Token ids of one conversation so far, without padding."""
        mask = self.inputs["attention_mask"][row].bool()
        return self.inputs["input_ids"][row][mask].tolist()


def batched(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def iterate_turns(
    batch: Sequence[Prompt], tokenizer, max_turns: int, device: Device = "cpu"
) -> Iterator[Turn]:
    """The turns that all prompts of a batch have, each continuing with the answers to the last."""
    given: list[list[str]] = [[] for _ in batch]
    for number in range(1, 1 + min(max_turns, *(len(prompt.turns) for prompt in batch))):
        talks = [messages(prompt, texts) for prompt, texts in zip(batch, given, strict=True)]
        turn = Turn(prompts=batch, number=number, inputs=encode(tokenizer, talks, device))
        yield turn
        assert turn.answers is not None, "the reader of a turn sets its answers"
        for texts, row in zip(given, turn.answers, strict=True):
            texts.append(tokenizer.decode(row, skip_special_tokens=True))


def messages(prompt: Prompt, answers: Sequence[str]) -> list[Message]:
    """The conversation up to the turn after ``answers``, ready for a chat template."""
    history = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn, answer in zip(prompt.turns, answers, strict=False):
        history += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*history, {"role": "user", "content": prompt.turns[len(answers)]}]


def encode(
    tokenizer, conversations: Sequence[list[Message]], device: Device = "cpu"
) -> dict[str, torch.Tensor]:
    """Token ids and attention mask ``[B, T]`` int64, padded on the left.

    Without a chat template the contents are joined by blank lines.
    """
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    try:
        if tokenizer.chat_template:
            batch = tokenizer.apply_chat_template(
                list(conversations),
                add_generation_prompt=True,
                padding=len(conversations) > 1,
                return_tensors="pt",
                return_dict=True,
            )
        else:
            texts = ["\n\n".join(m["content"] for m in turns) for turns in conversations]
            batch = tokenizer(texts, padding=len(texts) > 1, return_tensors="pt")
    finally:
        tokenizer.padding_side = side
    # Some tokenizers add token_type_ids, which causal models refuse.
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is not a JSON object")
    system, turns = _turns(row, where)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where} has an empty or non-text user turn")
    return Prompt(
        prompt_id=str(row.get("question_id", row.get("id", number))),
        turns=tuple(turns),
        category=str(row.get("category", "all")),
        system=system,
    )


def _turns(row: Mapping[str, Any], where: str) -> tuple[str | None, list[Any]]:
    for key in ("turns", "prompt"):
        if key in row:
            value = row[key]
            return None, value if isinstance(value, list) else [value]
    for key in ("conversations", "messages"):
        if key in row:
            pairs = [
                (m.get("role", m.get("from")), m.get("content", m.get("value"))) for m in row[key]
            ]
            system = next((text for role, text in pairs if role == "system"), None)
            return system, [text for role, text in pairs if role in ("user", "human")]
    raise ValueError(
        f"{where} has keys {sorted(row)}; expected 'turns', 'conversations', 'messages' or 'prompt'"
    )
