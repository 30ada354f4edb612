"""Proof that speculation does not change the output, prompt by prompt.

Every prompt is answered by Transformers' own `generate`, by plain decoding in the engine and by
speculation. Token ids must be equal. The first difference of every unequal pair goes to the
`Arbiter`; only a near tie is excused, and each is listed. After the first difference two greedy
runs have different prefixes, so nothing later can be compared.

What is promised: in fp32 the outputs are equal; in lower precision they may part at near ties, as
any two shapes of the same computation do. Coupled sampling is compared in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from .arbiter import Arbiter, Arbitration
from .arms import Arm, ArmRun
from .benchmark import pool_speculation
from .prompts import Device, Prompt, Turn, batched, iterate_turns

NEAR_TIE = "near tie"
UNEXPLAINED = "unexplained"
LENGTH = "different length"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """First difference of two arms on one prompt. ``position`` counts new tokens from 0."""

    prompt_id: str
    turn: int
    arms: tuple[str, str]
    position: int
    tokens: tuple[int | None, int | None]
    texts: tuple[str, str]
    kind: str
    arbitration: Arbitration | None

    @property
    def is_explained(self) -> bool:
        return self.kind == NEAR_TIE


@dataclass(kw_only=True)
class LosslessReport:
    """How many answers were compared, how many were equal, and every one that was not."""

    compared: Counter[tuple[str, str]] = field(default_factory=Counter)
    equal: Counter[tuple[str, str]] = field(default_factory=Counter)
    divergences: list[Divergence] = field(default_factory=list)
    speculation: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: int = 0

    @property
    def unexplained(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if not divergence.is_explained]

    @property
    def idle_arms(self) -> list[str]:
        """Speculative arms that never verified a drafted node: their equality proves nothing."""
        return [arm for arm, pooled in self.speculation.items() if not pooled.get("nodes_verified")]

    @property
    def is_ok(self) -> bool:
        return bool(self.compared) and not self.unexplained and not self.idle_arms


def check_lossless(
    arms: Mapping[str, Arm],
    prompts: Sequence[Prompt],
    tokenizer,
    arbiter: Arbiter | None,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    max_turns: int = 1,
    device: Device = "cpu",
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> LosslessReport:
    """Compare every pair of arms on every prompt and turn; the first arm continues conversations.

    Without an ``arbiter`` no difference is excused: sampled decoding has no near ties to look for.
    Raises `ValueError` with fewer than two arms.
    """
    if len(arms) < 2:
        raise ValueError(f"comparing needs two arms, got {sorted(arms)}")
    report = LosslessReport()
    runs: dict[str, list[ArmRun]] = {name: [] for name in arms}
    for batch in progress(batched(prompts, batch_size)):
        for turn in iterate_turns(batch, tokenizer, max_turns, device):
            results = {name: arm(turn.inputs, max_new_tokens) for name, arm in arms.items()}
            for name, run in results.items():
                runs[name].append(run)
            for row in range(len(batch)):
                rows = {name: run.tokens[row] for name, run in results.items()}
                _compare(report, turn, row, rows, tokenizer, arbiter)
            turn.answers = next(iter(results.values())).tokens
    report.speculation = {
        name: pool_speculation([run.speculation for run in runs[name]])
        for name in arms
        if name not in ("transformers", "plain")
    }
    return report


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends; None if equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def _compare(
    report: LosslessReport,
    turn: Turn,
    row: int,
    answers: Mapping[str, list[int]],
    tokenizer,
    arbiter: Arbiter | None,
) -> None:
    report.tokens += len(next(iter(answers.values())))
    for pair in combinations(answers, 2):
        first, second = answers[pair[0]], answers[pair[1]]
        report.compared[pair] += 1
        at = first_difference(first, second)
        if at is None:
            report.equal[pair] += 1
            continue
        tokens = _at(first, at), _at(second, at)
        kind, arbitration = LENGTH, None
        if tokens[0] is not None and tokens[1] is not None:
            kind = UNEXPLAINED
            if arbiter is not None:
                arbitration = arbiter.judge(turn.prefix(row) + first[:at], tokens[0], tokens[1])
                kind = NEAR_TIE if arbitration.is_near_tie else UNEXPLAINED
        report.divergences.append(
            Divergence(
                prompt_id=turn.prompts[row].prompt_id,
                turn=turn.number,
                arms=pair,
                position=at,
                tokens=tokens,
                texts=(_text(tokenizer, tokens[0]), _text(tokenizer, tokens[1])),
                kind=kind,
                arbitration=arbitration,
            )
        )


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _text(tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.decode([token])
