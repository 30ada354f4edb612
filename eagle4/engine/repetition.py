"""Answers that only repeat themselves: small models under greedy decoding often end in a loop."""

from __future__ import annotations

from collections import deque


class Repetition:
    """Counts the last tokens in a row that continue an earlier passage of the same answer.

    A token counts when it and the ``length - 1`` tokens before it stand somewhere earlier, too.
    """

    def __init__(self, length: int = 12):
        self._last: deque[int] = deque(maxlen=length)
        self._seen: set[tuple[int, ...]] = set()
        self._repeated = 0

    def add(self, token: int) -> int:
        """Take the answer's next token; the length of the repetition that ends with it."""
        self._last.append(token)
        if len(self._last) < (self._last.maxlen or 0):
            return 0
        passage = tuple(self._last)
        self._repeated = self._repeated + 1 if passage in self._seen else 0
        self._seen.add(passage)
        return self._repeated


def without_loop(answer: list[int], max_repeated: int) -> list[int]:
    """The answer up to ``max_repeated`` repeated tokens in a row (0: all of it)."""
    repetition = Repetition()
    for i, token in enumerate(answer):
        if 0 < max_repeated <= repetition.add(token):
            return answer[: i + 1]
    return answer
