"""Compiled forms of a round's functions: the only place with `torch.compile`.

These functions carry nearly all of a round's arithmetic and are compiled without graph breaks:

    block      one decoder block of the target on packed rows; one graph serves all blocks (regional
               compilation: a whole target takes as long to compile as it has blocks)
    draft      the drafter's layer on freshly verified rows (depth 0)
    propose    the efficient head: low-rank scores, candidates, exact logits, log-probabilities
    open_tree  the first level and its decision
    level      a whole further level: drafter, head, growth, survivals, the harness's decision
    finish     the nodes to verify, as a tree

Rows, contexts and batch sizes are symbolic, so trees of any shape share a graph; size 1 is the one
special case, which PyTorch compiles apart (`engine.warmup` meets all cases before the first round).
The last three are compiled once for every `TreeLimits`, whose numbers are constants to them.
The eager forms are the specification: `EAGER` runs them as they are, and a function that cannot be
compiled falls back to its own for good.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from ..drafter import DraftOutput, Eagle4Drafter
from ..target.blocks import run_block
from ..types import Candidates
from . import level
from .canvas import Canvas, Finished, TreeLimits

CompileMode = Literal["auto", "on", "off"]
Opened = tuple[Canvas, torch.Tensor]

logger = logging.getLogger("eagle4")


class TreeFunctions(NamedTuple):
    """`level.open_tree`, `level.level` and `level.finish`, compiled or not."""

    open_tree: Callable[..., Opened]
    level: Callable[..., Opened]
    finish: Callable[..., Finished]


class Graphs:
    """The functions of one pair's rounds. Compiled ones need `engine.warmup` once.

    ``falls_back``: what cannot be compiled runs eagerly; not among ranks, which would differ then.
    """

    def __init__(self, compiled: bool = False, falls_back: bool = True):
        self.compiled = compiled
        # What `engine.warmup` has been through, with several sequences or one.
        self.warm: set[tuple[str | TreeLimits, bool]] = set()
        wrap = partial(_Compiled, falls_back=falls_back) if compiled else _as_it_is
        self.draft: Callable[..., DraftOutput] = wrap(level.draft)
        self._wrap = wrap
        self._trees: dict[TreeLimits, TreeFunctions] = {}
        self._propose = wrap(level.propose) if compiled else None
        # Without it the blocks keep their own forward.
        self.block: Callable[..., Any] | None = wrap(run_block) if compiled else None

    def trees(self, limits: TreeLimits) -> TreeFunctions:
        """What drafts trees within these limits."""
        if limits not in self._trees:
            functions = level.open_tree, level.level, level.finish
            self._trees[limits] = TreeFunctions(*map(self._wrap, functions))
        return self._trees[limits]

    def decides_on(self, device: torch.device) -> bool:
        """Whether the harness decides in tensor code there.

        Eager tensor code on a CPU costs a millisecond per level more than the same decision in
        Python; compiled, or on an accelerator, it spares the host a look at every score.
        """
        return self.compiled or device.type != "cpu"

    def propose(self, drafter: Eagle4Drafter, head_RH: torch.Tensor, width: int) -> Candidates:
        """The drafter's best ``width`` tokens behind every row."""
        if self._propose is None:
            return drafter.propose(head_RH, width)
        token_RK, logp_RK = self._propose(drafter, head_RH)
        return Candidates(token_RK[:, :width], logp_RK[:, :width])


def check_mode(mode: str) -> None:
    """Raise `ValueError` on an unknown mode."""
    if mode not in get_args(CompileMode):
        raise ValueError(f"compile must be one of {get_args(CompileMode)}, got {mode!r}")


def is_compiled(mode: CompileMode, device: torch.device) -> bool:
    """What a mode means on a device. Raises `ValueError` on an unknown mode.

    "auto" compiles on accelerators, where launches dominate, and not on CPUs: there a target's
    block takes seconds to compile (and to load again in every process), which a short script
    never earns back. "on" suits long-lived CPU processes.
    """
    check_mode(mode)
    return mode == "on" or (mode == "auto" and device.type != "cpu")


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
        self._compiled = torch.compile(_own_code(function), fullgraph=True, dynamic=True)
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
