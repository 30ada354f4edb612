"""Compile a pair's functions before its first round, on made-up states of well-chosen sizes.

A compiler that sees two equal sizes takes them for the same quantity, and size 1 for a constant. So
every case (one row or several, one sequence or several) is met here once, with sizes that no other
quantity has; after that no tree, batch or context is new.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from tqdm.auto import tqdm

from ..drafter import Eagle4Drafter
from ..target import TargetAdapter
from .graphs import Graphs, num_compiled
from .parts import Stage

logger = logging.getLogger("eagle4")

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37)


def warm_up(
    graphs: Graphs, target: TargetAdapter, drafter: Eagle4Drafter | None, batch: int
) -> None:
    """Meet all cases of calls with ``batch`` sequences; returns at once where nothing is new.

    ``drafter`` is None for plain decoding. Call it where packed weights are active.
    """
    cases = _cases(graphs, target, drafter, batch)
    if not cases:
        return
    start, before = time.perf_counter(), num_compiled()
    with torch.no_grad(), target.attached(run_block=graphs.block):
        for name, case in tqdm(cases.items(), desc="compiling", disable=None, leave=False):
            case()  # a pool's first forward finds out its widths, eagerly
            case()
            graphs.warm.add(name)
    found, took = num_compiled() - before, time.perf_counter() - start
    logger.info("compiled %d graphs in %.1f s", found, took)


def _cases(
    graphs: Graphs, target: TargetAdapter, drafter: Eagle4Drafter | None, batch: int
) -> dict[str, Callable[[], object]]:
    if not graphs.compiled:
        return {}
    rows, several, context = _sizes(target)
    size = 1 if batch == 1 else several
    stage = Stage(target, drafter, size, context, graphs)
    cases: dict[str, Callable[[], object]] = {
        f"plain, {size} sequences": lambda: stage.verify(0),
        f"verify, {size} sequences": lambda: stage.verify(rows - 1),
    }
    if drafter is not None:
        cases |= {
            f"one row, {size} sequences": lambda: stage.root(1, size),
            f"rows, {size} sequences": lambda: stage.root(rows, size),
            f"level, {size} sequences": lambda: stage.level(min(rows, drafter.num_proposable)),
        }
    return {name: case for name, case in cases.items() if name not in graphs.warm}


def _sizes(target: TargetAdapter) -> tuple[int, int, int]:
    """Rows, sequences and a context that are no size of the model."""
    taken = {size for parameter in target.model.parameters() for size in parameter.shape}
    text = target.config
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers")
    taken |= {getattr(text, name, None) for name in names}
    rows, several, *rest = [prime for prime in _PRIMES if prime not in taken]
    return rows, several, rest[-1]
