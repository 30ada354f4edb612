"""Compile a pair's functions before its first round, on made-up states of well-chosen sizes.

A compiler that sees two equal sizes takes them for the same quantity, and size 1 for a constant. So
every case (one row or several, one sequence or several) is met here once, with sizes that no other
quantity has; after that no tree, batch or context is new.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch._dynamo import config as dynamo_config
from torch.fx.experimental import _config as fx_config
from tqdm.auto import tqdm

from ..drafter import Eagle4Drafter
from ..target import TargetAdapter
from .canvas import TreeLimits
from .graphs import Graphs, num_compiled
from .parts import Stage

logger = logging.getLogger("eagle4")

# The target; drafts that the host leads ("drafter"); or drafts that the device decides on.
Part = str | TreeLimits

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37)


def warm_up(
    graphs: Graphs,
    target: TargetAdapter,
    drafter: Eagle4Drafter | None,
    batch: int,
    limits: TreeLimits | None = None,
) -> None:
    """Meet all cases of calls with ``batch`` sequences; returns at once where nothing is new.

    ``drafter`` is None for plain decoding. ``limits``: of the trees that the device decides on;
    None: the host leads the drafts. Call it where packed weights are active.
    """
    parts: list[Part] = ["target"]
    if drafter is not None:
        parts.append(limits or "drafter")
    missing = [part for part in parts if (part, batch > 1) not in graphs.warm]
    if not graphs.compiled or not missing:
        return
    start, before = time.perf_counter(), num_compiled()
    rows, several, context = _sizes(target)
    several = several if batch > 1 else 1
    cases = []
    for part in missing:
        own = part if isinstance(part, TreeLimits) else None
        cases += _cases(Stage(target, drafter, several, context, graphs, own), part, rows)
    # Equal sizes are a coincidence, not a law to be guarded; a model's own numbers never change.
    unequal = fx_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    constant = dynamo_config.patch(specialize_float=True)  # type: ignore[attr-defined]
    directly = nullcontext() if graphs.replays is None else graphs.replays.paused()
    with torch.no_grad(), target.attached(run_blocks=graphs.blocks), unequal, constant, directly:
        for case in tqdm(cases, desc="compiling", disable=None, leave=False):
            case()  # a pool's first forward finds out its widths, eagerly
            case()
    graphs.warm.update((part, batch > 1) for part in missing)
    found, took = num_compiled() - before, time.perf_counter() - start
    logger.info("compiled %d graphs in %.1f s", found, took)


def _cases(stage: Stage, part: Part, rows: int) -> list[Callable[[], object]]:
    """One row per sequence and several, in every function of the target or the drafter."""
    if part == "target":
        return [partial(stage.verify, 0), partial(stage.verify, rows - 1)]
    size, widest = len(stage.state.sequences), stage.drafter.num_proposable
    roots = [partial(stage.root, count, size) for count in (1, rows)]
    if isinstance(part, str):
        return [*roots, partial(stage.level, min(rows, widest))]
    # A width that is neither 1 nor all of the frontier, where there is one.
    widths = sorted({1, max(part.top_k - 1, min(part.top_k, 2))}) if part.max_depth > 1 else []
    return [*roots, *(partial(stage.level, width) for width in widths), stage.finish]


def _sizes(target: TargetAdapter) -> tuple[int, int, int]:
    """Rows, sequences and a context that are no size of the model."""
    taken = {size for parameter in target.model.parameters() for size in parameter.shape}
    text = target.config
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers")
    taken |= {getattr(text, name, None) for name in names}
    rows, several, *rest = [prime for prime in _PRIMES if prime not in taken]
    return rows, several, rest[-1]
