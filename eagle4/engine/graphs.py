"""Compiled forms of a round's functions: the only place with `torch.compile`.

Three functions carry nearly all of a round's arithmetic and are compiled without graph breaks:

    block    one decoder block of the target on packed rows; one graph serves all blocks (regional
             compilation: a whole target takes as long to compile as it has blocks)
    draft    the drafter's layer on the rows of one level, or on freshly verified rows
    propose  the efficient head: low-rank scores, candidates, exact logits, log-probabilities

Rows, contexts and batch sizes are symbolic, so trees of any shape share a graph; size 1 is the one
special case, which PyTorch compiles apart (`engine.warmup` meets all cases before the first round).
The eager forms are the specification: `EAGER` runs them as they are, and a function that cannot be
compiled falls back to its own for good.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch._dynamo.exc import TorchDynamoException

from ..cache import LayerStep, attend_layer
from ..drafter import DraftOutput, Eagle4Drafter
from ..target.blocks import run_block
from ..types import Candidates

CompileMode = Literal["auto", "on", "off"]

MAX_CANDIDATES = 128  # of a law that tokens are drawn from

logger = logging.getLogger("eagle4")


def draft(
    drafter: Eagle4Drafter,
    hidden_RH: torch.Tensor,
    token_R: torch.Tensor,
    position_R: torch.Tensor,
    step: LayerStep,
) -> DraftOutput:
    """One drafter step on packed rows; their K/V goes to the slots of ``step``."""

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        window = drafter.config.sliding_window
        return attend_layer(step, query, key, value, sliding_window=window)

    return drafter(hidden_RH, token_R, position_R, attention)


def propose(drafter: Eagle4Drafter, head_RH: torch.Tensor) -> Candidates:
    """As many of the drafter's candidates behind every row as anybody asks for, best first."""
    return drafter.propose(head_RH, min(drafter.num_proposable, MAX_CANDIDATES))


class Graphs:
    """The functions of one pair's rounds. Compiled ones need `engine.warmup` once."""

    def __init__(self, compiled: bool = False):
        self.compiled = compiled
        # What `engine.warmup` has been through: "target" or "drafter", several sequences or one.
        self.warm: set[tuple[str, bool]] = set()
        self.draft: Callable[..., DraftOutput] = _Compiled(draft) if compiled else draft
        self._propose = _Compiled(propose) if compiled else None
        # Without it the blocks keep their own forward.
        self.block: Callable[..., Any] | None = _Compiled(run_block) if compiled else None

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


class _Compiled:
    """A compiled function that gives way to its eager form when it cannot be compiled."""

    def __init__(self, function: Callable):
        self._eager = function
        self._compiled = torch.compile(_own_code(function), fullgraph=True, dynamic=True)
        self._fails = False

    def __call__(self, *args):
        if self._fails:
            return self._eager(*args)
        try:
            return self._compiled(*args)
        except TorchDynamoException as error:
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
