"""Paired speed measurement: every arm answers every prompt, in one process, in rotating order.

Definitions, fixed here and nowhere else:

- *tokens per second* of an arm: all new tokens / all seconds of its `generate` calls, prefill
  included, EOS counted, padding not. Repeats of one cell are first reduced to their median.
- *ratio* of two arms: the median over cells of the quotient of their tokens per second in that
  cell. A cell is one prompt (or batch) and turn, measured back to back, so that a machine that
  slows down slows both.
- *accept length*: committed tokens per target verification, bonus included. 1.0 is what plain
  decoding gets.
- *acceptance at depth d*: accepted nodes at depth d / rounds that drafted depth d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .arms import Arm, ArmRun
from .prompts import Device, Prompt, batched, iterate_turns


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to run. ``reference`` is the arm whose answers continue a conversation."""

    max_new_tokens: int = 128
    batch_size: int = 1
    max_turns: int = 1
    repeats: int = 1
    warmup: int = 1
    reference: str = "plain"

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size", "max_turns", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(kw_only=True)
class Cell:
    """One prompt (or batch) and turn, answered by every arm ``repeats`` times."""

    prompt_ids: list[str]
    category: str
    turn: int
    context: int
    runs: dict[str, list[ArmRun]] = field(default_factory=dict)

    def seconds(self, arm: str) -> float:
        return median(run.seconds for run in self.runs[arm])

    def tokens_per_s(self, arm: str) -> float:
        return self.runs[arm][0].num_tokens / self.seconds(arm)


def run_benchmark(
    arms: Mapping[str, Arm],
    prompts: Sequence[Prompt],
    tokenizer,
    config: BenchConfig | None = None,
    device: Device = "cpu",
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> list[Cell]:
    """Measure all arms on all prompts; `summarise` turns the cells into a result.

    The first ``warmup`` batches are run and thrown away. Conversations continue with the
    reference arm's answers, so that all arms see the same context in every turn.
    """
    config = config or BenchConfig()
    if config.reference not in arms:
        raise ValueError(f"reference arm {config.reference!r} is not among {sorted(arms)}")
    batches = batched(prompts, config.batch_size)
    for batch in batches[: config.warmup]:
        _measure(arms, batch, tokenizer, config, device, 0)
    cells: list[Cell] = []
    for batch in progress(batches):
        cells += _measure(arms, batch, tokenizer, config, device, len(cells))
    return cells


def _measure(
    arms: Mapping[str, Arm],
    batch: Sequence[Prompt],
    tokenizer,
    config: BenchConfig,
    device: Device,
    offset: int,
) -> list[Cell]:
    cells = []
    for turn in iterate_turns(batch, tokenizer, config.max_turns, device):
        cell = Cell(
            prompt_ids=[prompt.prompt_id for prompt in batch],
            category=batch[0].category,
            turn=turn.number,
            context=turn.context,
            runs={name: [] for name in arms},
        )
        for repeat in range(config.repeats):
            for name in rotated(list(arms), offset + len(cells) + repeat):
                cell.runs[name].append(arms[name](turn.inputs, config.max_new_tokens))
        turn.answers = cell.runs[config.reference][0].tokens
        cells.append(cell)
    return cells


def rotated(names: list[str], step: int) -> list[str]:
    """The same names, starting ``step`` further on: no arm always runs first or warm."""
    shift = step % len(names)
    return names[shift:] + names[:shift]


def summarise(
    cells: Sequence[Cell], baselines: Sequence[str] = ("transformers", "plain")
) -> dict[str, dict[str, dict[str, Any]]]:
    """Tokens per second, ratios, accept length and equality, per arm and per category."""
    arms = list(cells[0].runs)
    baselines = [name for name in baselines if name in arms]
    groups = {"all": list(cells)}
    for cell in cells:
        groups.setdefault(cell.category, []).append(cell)
    if len(groups) == 2:
        groups = {"all": groups["all"]}
    return {
        group: {arm: _arm_summary(members, arm, baselines) for arm in arms}
        for group, members in groups.items()
    }


def _arm_summary(cells: Sequence[Cell], arm: str, baselines: Sequence[str]) -> dict[str, Any]:
    tokens = sum(cell.runs[arm][0].num_tokens for cell in cells)
    seconds = sum(cell.seconds(arm) for cell in cells)
    summary: dict[str, Any] = {
        "cells": len(cells),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
    }
    for base in baselines:
        ratios = [cell.tokens_per_s(arm) / cell.tokens_per_s(base) for cell in cells]
        equal = [cell.runs[arm][0].tokens == cell.runs[base][0].tokens for cell in cells]
        summary[f"ratio_to_{base}"] = round(median(ratios), 3)
        summary[f"cells_equal_to_{base}"] = sum(equal)
    return summary | pool_speculation([cell.runs[arm][0].speculation for cell in cells])


def pool_speculation(runs: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Statistics over several calls. Averages are weighted by their denominators."""
    known = [run for run in runs if run and run["rounds"]]
    if not known:
        return {}
    counts = [_verifications(run) for run in known]
    pooled: dict[str, Any] = {
        name: sum(run[name] or 0 for run in known)
        for name in ("rounds", "target_calls", "nodes_drafted", "nodes_verified", "plain_rounds")
    }
    lengths = [run["accept_length"] for run in known]
    # Without a speculative round every target call commits one token.
    pooled["accept_length"] = round(_mean(lengths, counts, empty=1.0), 4)
    pooled["acceptance_by_depth"] = _pool_depths(known, counts)
    pooled["fallbacks"] = _add([run["fallbacks"] or {} for run in known])
    stages = _add([run["seconds"] or {} for run in known])
    pooled["seconds_by_stage"] = {stage: round(value, 3) for stage, value in stages.items()}
    return pooled


def _verifications(run: Mapping[str, Any]) -> int:
    """Speculative verifications of one call: the denominator of its accept length."""
    if run.get("verifications") is not None:
        return run["verifications"]
    return run["rounds"] - (run["plain_rounds"] or 0)


def _pool_depths(runs: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> list[float]:
    rows = [run["acceptance_by_depth"] or [] for run in runs]
    drafted = [
        run.get("drafted_by_depth") or [count] * len(row)
        for run, row, count in zip(runs, rows, counts, strict=True)
    ]
    pooled = []
    for depth in range(max(map(len, rows))):
        deep = [(row[depth], n[depth]) for row, n in zip(rows, drafted, strict=True) if row[depth:]]
        pooled.append(round(_mean([value for value, _ in deep], [n for _, n in deep]), 4))
    return pooled


def cell_record(cell: Cell) -> dict[str, Any]:
    """One cell for the JSON file: everything measured, without the token ids."""
    runs = {
        arm: [
            {"tokens": run.num_tokens, "seconds": run.seconds, "speculation": run.speculation}
            for run in repeats
        ]
        for arm, repeats in cell.runs.items()
    }
    return {
        "prompt_ids": cell.prompt_ids,
        "category": cell.category,
        "turn": cell.turn,
        "context": cell.context,
        "runs": runs,
    }


def _mean(values: Sequence[float], weights: Sequence[float], empty: float = 0.0) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else empty


def _add(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for key, value in table.items():
            total[key] = total.get(key, 0) + value
    return total
