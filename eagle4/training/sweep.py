"""What rank and how many candidates are worth: recall against measured cost, for a trained drafter.

For every rank the factors are fitted as in training, and every count of candidates is judged with
them: share of the full head's best tokens that are retrieved, by depth, and the time of one
proposal next to the full head's. Nothing of the drafter changes.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..drafter.head import propose_full
from ..drafter.model import Eagle4Drafter
from .candidates import candidate_recall, fit_factors, stage_states
from .settings import CandidateConfig
from .trainer import Trainer

ROWS, TOP_K, REPEATS = 4, 4, 30


class Point(NamedTuple):
    """One candidate head."""

    rank: int
    num_candidates: int
    recall_first: float  # held out, at depth 0
    recall_least: float  # at the worst depth
    propose_us: float  # median time of a proposal for four rows
    full_us: float  # the same with the full head
    factor_bytes: int  # of both factors in the drafter's dtype

    @property
    def speedup(self) -> float:
        return self.full_us / self.propose_us


def sweep(
    trainer: Trainer,
    drafter: Eagle4Drafter,
    ranks: Sequence[int],
    counts: Sequence[int],
    config: CandidateConfig,
    dtype: torch.dtype = torch.float32,
) -> list[Point]:
    """A point for every rank and count; times are of ``dtype`` on the drafter's device."""
    train, held_out = stage_states(trainer, drafter, config)
    points = []
    for rank in ranks:
        candidate = with_rank(drafter, rank)
        fit_factors(trainer, candidate, torch.cat(train), config)
        served: Any = copy.deepcopy(candidate).to(dtype)  # pyright: ignore
        embed, head = (copy.deepcopy(m).to(dtype) for m in (drafter.embedding, drafter.head))
        served.bind(embed, head)
        rows = held_out[0][:ROWS].to(dtype)
        full_us = median_us(lambda rows=rows, head=head: propose_full(head, rows, TOP_K))
        for count in counts:
            for model in (candidate, served):
                model.config.num_candidates = count
            recall = candidate_recall(candidate, held_out)
            spent = median_us(lambda rows=rows, model=served: model.propose(rows, TOP_K))
            size = rank * (drafter.config.hidden_size + drafter.config.vocab_size)
            factor_bytes = size * torch.finfo(dtype).bits // 8
            points.append(Point(rank, count, recall[0], min(recall), spent, full_us, factor_bytes))
    return points


def with_rank(drafter: Eagle4Drafter, rank: int) -> Eagle4Drafter:
    """A bound copy whose candidate head has another rank, its factors unset."""
    config = copy.deepcopy(drafter.config)
    config.candidate_rank = rank
    copied = Eagle4Drafter(config)
    copied.to(drafter.device, drafter.dtype)  # pyright: ignore
    own = copied.state_dict()
    kept = {
        name: value
        for name, value in drafter.state_dict().items()
        if name in own and value.shape == own[name].shape
    }
    copied.load_state_dict(kept, strict=False)
    return copied.bind(drafter.embedding, drafter.target_head)


@torch.no_grad()
def median_us(work: Callable[[], object]) -> float:
    """Median microseconds of a call on the device."""
    times = []
    for _ in range(REPEATS + 3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times[3:])


def as_table(points: Sequence[Point]) -> str:
    """Markdown, a row per point."""
    lines = [
        "| rank | candidates | recall, depth 0 | worst depth | propose us | full head us | MB |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for p in points:
        lines.append(
            f"| {p.rank} | {p.num_candidates} | {p.recall_first:.4f} | {p.recall_least:.4f} "
            f"| {p.propose_us:.0f} | {p.full_us:.0f} | {p.factor_bytes / 1e6:.1f} |"
        )
    return "\n".join(lines)
