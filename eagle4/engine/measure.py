"""Measure a cost table: medians of interleaved repetitions of callables.

Cases take turns, so a slow moment of the machine hits all of them alike; the first turn warms up
and is not counted. `engine.parts` makes the callables for a loaded pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..harness import CostTable
from ..harness.surface import Surface

LEAST = 3  # repetitions, so that one stall of the machine is no median

Case = Callable[[], object]
Cases = Mapping[tuple[str, int, int], Case]  # (kind, rows, context)


class Grid(NamedTuple):
    """Points at which the parts are measured."""

    verify_rows: tuple[int, ...]
    plain_batches: tuple[int, ...]
    root_rows: tuple[int, ...]
    level_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    budget_s: float  # no further repetition is started after this


COARSE = Grid((1, 2, 4, 8, 12, 17, 33), (1, 2, 4, 8), (2, 32, 256), (1, 2, 4, 16), (256,), 5, 3.0)
FINE = Grid(
    (1, 2, 3, 4, 6, 8, 10, 12, 14, 17, 20, 24, 33, 49, 65),
    (1, 2, 3, 4, 6, 8, 16),
    (1, 2, 4, 8, 32, 128, 256),
    (1, 2, 3, 4, 8, 16, 32),
    (256, 1024, 4096),
    15,
    180.0,
)


def interleaved(
    cases: Cases,
    repeats: int,
    budget_s: float,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    synchronize: Callable[[], None] = lambda: None,
    agree: Callable[[bool], bool] = bool,
) -> dict[tuple[str, int, int], list[int]]:
    """Nanoseconds of every repetition of every case, at least `LEAST` each.

    ``agree``: whether the time is up, as all ranks shall see it.
    """
    taken: dict[tuple[str, int, int], list[int]] = {key: [] for key in cases}
    begin = clock_ns()
    for repeat in range(repeats + 1):
        if repeat > LEAST and agree(clock_ns() - begin > 1e9 * budget_s):
            break
        for key, case in cases.items():
            synchronize()
            start = clock_ns()
            case()
            synchronize()
            if repeat > 0:
                taken[key].append(max(1, clock_ns() - start))
    return taken


def surfaces(taken: Mapping[tuple[str, int, int], list[int]]) -> dict[str, Surface]:
    """Medians and half interquartile ranges as surfaces; every kind's grid must be complete."""
    found = {}
    for kind in dict.fromkeys(key[0] for key in taken):
        rows = sorted({r for k, r, _ in taken if k == kind})
        contexts = sorted({c for k, _, c in taken if k == kind})
        found[kind] = Surface(
            rows,
            contexts,
            [[float(statistics.median(taken[kind, r, c])) for c in contexts] for r in rows],
            [[_spread(taken[kind, r, c]) for c in contexts] for r in rows],
        )
    return found


def measure(
    cases: Cases,
    grid: Grid,
    fingerprint: Mapping[str, object],
    synchronize: Callable[[], None] = lambda: None,
    agree: Callable[[bool], bool] = bool,
) -> CostTable:
    """A cost table from the callables of one setup; options as those of `interleaved`."""
    taken = interleaved(cases, grid.repeats, grid.budget_s, synchronize=synchronize, agree=agree)
    return CostTable(surfaces(taken), fingerprint=fingerprint)


def _spread(values: list[int]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2
