"""Compiled and recorded forms of a round's functions: the only place with `torch.compile`.

These functions carry nearly all of a round's arithmetic and are compiled without graph breaks:

    blocks     a few decoder blocks of the target in a row; one graph serves all such groups
               (regional compilation: a whole target takes as long to compile as it has blocks)
    draft      the drafter's layer on freshly verified rows (depth 0)
    propose    the efficient head: low-rank scores, candidates, exact logits, log-probabilities
    open_tree  the first level and its decision
    level      a whole further level: drafter, head, growth, survivals, the harness's decision
    finish     the nodes to verify, as a tree

Rows, contexts and batch sizes are symbolic, so trees of any shape share a graph; size 1 is the one
special case, which PyTorch compiles apart (`engine.warmup` meets all cases before the first round).
The last three are compiled once for every `TreeLimits`, whose numbers are constants to them.
The eager forms are the specification: `EAGER` runs them as they are, and a function that cannot be
compiled falls back to its own for good. Either form may be recorded and replayed (`replay`), and so
may a whole packed forward of the target; blocks, which are part of it, are not.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from ..cache import AttentionStep, KVPool, StepParts
from ..drafter import DraftOutput, Eagle4Drafter
from ..target import TargetAdapter, TargetOutput
from ..target.blocks import run_blocks
from ..types import Candidates
from . import level
from .canvas import Canvas, Finished, TreeLimits
from .replay import Replays

CompileMode = Literal["auto", "on", "off"]
Opened = tuple[Canvas, torch.Tensor]
# Arguments and fields that hold K/V pools, which stay where they are.
STATIC = frozenset({"pools", "keys_SHD", "values_SHD"})

logger = logging.getLogger("eagle4")


class TreeFunctions(NamedTuple):
    """`level.open_tree`, `level.level` and `level.finish`, compiled or not."""

    open_tree: Callable[..., Opened]
    level: Callable[..., Opened]
    finish: Callable[..., Finished]


class Graphs:
    """The functions of one pair's rounds. Compiled ones need `engine.warmup` once.

    ``falls_back``: what cannot be compiled runs eagerly; not among ranks, which would differ then.
    ``replays`` records the functions; None launches them one operation at a time.
    """

    def __init__(
        self, compiled: bool = False, falls_back: bool = True, replays: Replays | None = None
    ):
        self.compiled = compiled
        self.replays = replays
        # What `engine.warmup` has been through, with several sequences or one.
        self.warm: set[tuple[str | TreeLimits, bool]] = set()
        compile_one = partial(_Compiled, falls_back=falls_back) if compiled else _as_it_is

        def wrap(function: Callable) -> Callable:
            own = compile_one(function)
            return own if replays is None else replays.wrap(own, function)

        self.draft: Callable[..., DraftOutput] = wrap(level.draft)
        self._wrap = wrap
        self._trees: dict[TreeLimits, TreeFunctions] = {}
        is_changed = compiled or replays is not None
        self._propose = wrap(level.propose) if is_changed else None
        # Without it the blocks keep their own forward.
        self.blocks: Callable[..., Any] | None = compile_one(run_blocks) if compiled else None
        self._rows = None if replays is None else replays.wrap(packed_rows, packed_rows)

    def trees(self, limits: TreeLimits) -> TreeFunctions:
        """What drafts trees within these limits."""
        if limits not in self._trees:
            functions = level.open_tree, level.level, level.finish
            self._trees[limits] = TreeFunctions(*map(self._wrap, functions))
        return self._trees[limits]

    def decides_on(self, device: torch.device) -> bool:
        """Whether the harness decides in tensor code there.

        Eager tensor code on a CPU costs a millisecond per level more than the same decision in
        Python; compiled, replayed or on an accelerator, it spares the host a look at every score.
        """
        return self.compiled or self.replays is not None or device.type != "cpu"

    def propose(self, drafter: Eagle4Drafter, head_RH: torch.Tensor, width: int) -> Candidates:
        """The drafter's best ``width`` tokens behind every row."""
        if self._propose is None:
            return drafter.propose(head_RH, width)
        token_RK, logp_RK = self._propose(drafter, head_RH)
        return Candidates(token_RK[:, :width], logp_RK[:, :width])

    def forward(
        self,
        target: TargetAdapter,
        token_R: torch.Tensor,
        step: AttentionStep,
        pool: KVPool,
        all_hidden_states: bool = False,
    ) -> TargetOutput:
        """`TargetAdapter.forward` on verified rows."""
        # Recurrent layers keep their state in Python; the first forward makes the pools.
        if self._rows is None or all_hidden_states or target.mixers or not pool.layers:
            return target.forward(token_R, step, pool, None, all_hidden_states)
        pools = tuple(pool.layers.items())
        rows = target, token_R, step.parts
        logits_RV, features_RTH = self._rows(*rows, pools, target.taps_now)
        return TargetOutput(logits_RV, features_RTH, None)

    def pool(self, kind: str) -> KVPool:
        """An empty pool for the "target" or the "draft"; replayed launches need theirs to stay."""
        return KVPool() if self.replays is None else self.replays.pools[kind].pool()


def packed_rows(
    target: TargetAdapter,
    token_R: torch.Tensor,
    parts: StepParts,
    pools: tuple[tuple[int, tuple[torch.Tensor, torch.Tensor]], ...],
    taps: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits ``[R, V]`` and features of packed rows; ``taps``: the blocks that are tapped now."""
    out = target.forward(token_R, AttentionStep.of(parts), KVPool(dict(pools)))
    return out.logits_RV, out.features_RTH


def check_mode(mode: str) -> None:
    """Raise `ValueError` on an unknown mode."""
    if mode not in get_args(CompileMode):
        raise ValueError(f"compile must be one of {get_args(CompileMode)}, got {mode!r}")


def is_compiled(mode: str, device: torch.device) -> bool:
    """What a mode means on a device. Raises `ValueError` on an unknown mode.

    "auto" compiles on accelerators, where launches dominate, and not on CPUs: there a target's
    block takes seconds to compile (and to load again in every process), which a short script
    never earns back. "on" suits long-lived CPU processes.
    """
    check_mode(mode)
    return mode == "on" or (mode == "auto" and device.type != "cpu")


def compiled(function: Callable) -> Callable:
    """``function`` compiled as one graph, sizes symbolic; eagerly, with a warning, if it cannot be.

    A separate compilation for every call of this, even of one function.
    """
    return _Compiled(function)


def num_compiled() -> int:
    """Graphs that this process has compiled so far, for telling a warm-up from a round."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _as_it_is(function: Callable) -> Callable:
    return function


class _Compiled:
    """A compiled function that gives way to its eager form when it cannot be compiled."""

    def __init__(self, function: Callable, falls_back: bool = True):
        self._eager = function
        self._falls_back = falls_back
        # Without checks of sizes that the guards have seen; together as dear as a kernel.
        options: dict[str, Any] = {"size_asserts": False}
        self._compiled = torch.compile(
            _own_code(function), fullgraph=True, dynamic=True, options=options
        )
        self._fails = False

    def __call__(self, *args):
        if self._fails:
            return self._eager(*args)
        try:
            return self._compiled(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            if not self._falls_back:
                raise
            self._fails = True
            reason = str(error).strip().splitlines()[0]
            logger.warning(
                "%s cannot be compiled here and runs eagerly from now on: %s",
                self._eager.__name__,
                reason,
            )
            return self._eager(*args)


def _own_code(function: Callable) -> Callable:
    """A copy with a code object of its own, which is what the compiler keeps its graphs by.

    Two models in one process then neither share nor exhaust each other's graphs.
    """
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__)


EAGER = Graphs()
