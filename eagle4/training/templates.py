"""From conversations to token ids and loss masks, by the tokenizer's own chat template.

A prompt is the template's text with the generation prompt. An answer is what the template puts
behind that prompt, up to and including the end of turn: precisely the tokens that the target writes
when it serves. A template with ``{% generation %}`` marks its answers itself. For any other the
template is asked twice per assistant turn, without and with the answer, and the difference is the
answer.

Templates that drop the thinking of earlier turns make the second text no continuation of the first;
such a conversation becomes one sequence per assistant turn, each as the target would see it, so no
thinking text is lost. Every mask is checked by decoding what it supervises.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from typing import Any, NamedTuple

from .dialects import Conversation, Tokens


class _Answer(NamedTuple):
    before: str  # the prompt's text
    after: str  # the same with the answer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that holds its special tokens already."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def render(tokenizer: Any, conversation: Conversation, is_prompt: bool) -> str:
    """The template's text; with the generation prompt if an answer is to follow."""
    tools = {"tools": conversation.tools} if conversation.tools else {}
    return tokenizer.apply_chat_template(
        conversation.messages, tokenize=False, add_generation_prompt=is_prompt, **tools
    )


def template_fingerprint(tokenizer: Any) -> str | None:
    """sha256 of the chat template, None without one."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()


def supervised(
    tokenizer: Any, conversation: Conversation, ends: Collection[int], where: str = "row"
) -> list[Tokens]:
    """Training sequences of a conversation's own answers; none if it has no assistant turn.

    ``ends``: ids that end a turn. Raises `ValueError` when a mask does not decode to the answers.
    """
    places = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if not places:
        return []
    if "{% generation" in str(tokenizer.chat_template):
        return [_marked(tokenizer, conversation, where)]
    answers = [_answer(tokenizer, conversation, i, where) for i in places]
    whole = answers[-1].after
    if all(whole.startswith(answer.after) for answer in answers):
        return [_sequence(tokenizer, whole, answers, ends, where)]
    return [_sequence(tokenizer, a.after, [a], ends, where) for a in answers]


def _marked(tokenizer: Any, conversation: Conversation, where: str) -> Tokens:
    tools = {"tools": conversation.tools} if conversation.tools else {}
    out = tokenizer.apply_chat_template(
        conversation.messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **tools,
    )
    ids, mask = list(out["input_ids"]), [bool(value) for value in out["assistant_masks"]]
    found = _squeezed(tokenizer.decode([t for t, is_own in zip(ids, mask, strict=True) if is_own]))
    for message in conversation.messages:
        content = _squeezed(message["content"])
        if message["role"] == "assistant" and content not in found:
            raise ValueError(
                f"{where}: the template's assistant mask does not cover an answer: {content[:60]!r}"
            )
    return Tokens(ids, mask)


def _answer(tokenizer: Any, conversation: Conversation, place: int, where: str) -> _Answer:
    messages, tools = conversation
    before = render(tokenizer, Conversation(messages[:place], tools), is_prompt=True)
    after = render(tokenizer, Conversation(messages[: place + 1], tools), is_prompt=False)
    if not after.startswith(before):
        # Thinking templates open the thought in the prompt but write it themselves in the history.
        before = render(tokenizer, Conversation(messages[:place], tools), is_prompt=False)
        before += _shared_header(tokenizer, before, after, conversation, place)
    if not after.startswith(before) or after == before:
        raise ValueError(
            f"{where}: the chat template rewrites the prompt of turn {place + 1} once it is "
            "answered; regenerate the answers instead of keeping them"
        )
    return _Answer(before, after)


def _shared_header(
    tokenizer: Any, before: str, after: str, conversation: Conversation, place: int
) -> str:
    """What prompt and answered text have in common behind the history: the assistant's header.

    Whole words only: half a word would be other tokens.
    """
    prompt = render(
        tokenizer, Conversation(conversation.messages[:place], conversation.tools), is_prompt=True
    )
    header = os.path.commonprefix([prompt.removeprefix(before), after.removeprefix(before)])
    return header[: len(header) - len(header.split(" ")[-1].split("\n")[-1])]


def _sequence(
    tokenizer: Any, whole: str, answers: list[_Answer], ends: Collection[int], where: str
) -> Tokens:
    ids: list[int] = []
    mask: list[bool] = []
    at = 0
    for answer in answers:
        prompt, text = whole[at : len(answer.before)], whole[len(answer.before) : len(answer.after)]
        prompt_ids, answer_ids = encode(tokenizer, prompt), encode(tokenizer, text)
        # What follows the end of turn (a newline, say) is the template's, not the target's.
        last = max((i for i, t in enumerate(answer_ids) if t in ends), default=len(answer_ids) - 1)
        ids += prompt_ids + answer_ids
        mask += [False] * len(prompt_ids) + [i <= last for i in range(len(answer_ids))]
        _check_text(tokenizer, answer_ids, text, where)
        at = len(answer.after)
    return Tokens(ids, mask)


def _check_text(tokenizer: Any, ids: list[int], text: str, where: str) -> None:
    found = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if _squeezed(found) != _squeezed(text):
        raise ValueError(
            f"{where}: an answer does not survive the tokenizer: {text[:60]!r} came back as "
            f"{found[:60]!r}"
        )


def _squeezed(text: str) -> str:
    """Without white space, which some tokenizers normalise."""
    return "".join(text.split())
