"""Decoder blocks that run through a given function: the seam for compiled blocks.

All blocks of a model are alike but for their weights, so one compiled function serves them all: it
gets blocks as an argument and their shares of the step as plain tensors (`LayerStep`). A call of
such a function costs the host about as much as a small block's arithmetic does, so a few blocks in
a row go into one. The model still calls every block: the first runs them all, the others hand out
what it found, as long as each is called with its predecessor's output and otherwise like it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from ..cache import LayerStep
from .attention import KEYWORD, AttentionCall, PackedState

MOST_TOGETHER = 4  # more blocks gain nothing and take longer to compile

RunBlocks = Callable[[list[nn.Module], list[LayerStep], tuple, dict[str, Any]], list[Any]]


def run_blocks(
    blocks: list[nn.Module], steps: list[LayerStep], args: tuple, kwargs: dict[str, Any]
) -> list[Any]:
    """The outputs of blocks in a row, by the forwards that their classes define."""
    found, (hidden, *rest) = [], args
    for block, step in zip(blocks, steps, strict=True):
        out = type(block).forward(block, hidden, *rest, **kwargs, **{KEYWORD: step})
        found.append(out)
        hidden = _hidden(out)
    return found


@contextmanager
def replaced(blocks: Iterable[nn.Module], run: RunBlocks | None) -> Iterator[None]:
    """Inside, the blocks run through ``run`` once their K/V pools exist; None changes nothing."""
    found = [] if run is None else [_StandIn.of(block) for block in blocks]
    stand_ins = [stand_in for stand_in in found if stand_in is not None]
    size = _group_size(len(found)) if len(stand_ins) == len(found) else 1
    may = _May(size > 1)
    try:
        for first in range(0, len(stand_ins), size):
            group = _Group(stand_ins[first : first + size], run, may)  # type: ignore[arg-type]
            for place, stand_in in enumerate(group.members):
                stand_in.block.forward = stand_in.bind(group, place)  # type: ignore[method-assign]
        yield
    finally:
        for stand_in in stand_ins:
            stand_in.block.__dict__.pop("forward", None)


def _group_size(count: int) -> int:
    """The largest divisor that is not too large: groups of one size share a graph."""
    return next(size for size in range(MOST_TOGETHER, 0, -1) if count % size == 0)


@dataclass
class _May:
    """Whether a model's blocks may run together.

    All or none: groups and single blocks would be twice as many graphs.
    """

    run_together: bool


class _Group:
    """Blocks in a row that run together, and what the forward that is under way found."""

    def __init__(self, members: Sequence[_StandIn], run: RunBlocks, may: _May):
        self.members, self.run, self.may = members, run, may
        self._left: list[Any] = []  # outputs that members have not handed out
        self._next = 0  # the member whose turn it is
        self._input: Any = None  # what it must be called with, unchanged
        self._version = 0
        self._given: list[Any] = []  # all other arguments

    def watch(self, place: int, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """A first forward, in which all run by themselves: may they run together later?"""
        if self.may.run_together and (place == 0 or self._goes_on(place, args, kwargs)):
            if place == 0:
                self._given = _others(args, kwargs)
            self._hand_out(place, out)

    def start(self, args: tuple, kwargs: dict[str, Any], state: PackedState) -> Any:
        """Run all members; the output of the first."""
        steps = [member.step(state) for member in self.members]
        blocks = [member.block for member in self.members]
        self._given = _others(args, kwargs)
        self._left = self.run(blocks, steps, args, kwargs)
        return self._hand_out(0, self._left.pop(0))

    def take(self, place: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The output of the member at ``place``; None if it is called otherwise than expected."""
        if not self._goes_on(place, args, kwargs):
            return None
        return self._hand_out(place, self._left.pop(0))

    def _hand_out(self, place: int, out: Any) -> Any:
        """``out`` is the next member's input; after the last one there is nothing to keep."""
        self._next, self._input = place + 1, _hidden(out)
        if self._next == len(self.members):
            self._next, self._input, self._given = 0, None, []
        elif not isinstance(self._input, torch.Tensor) or self._input.is_inference():
            self._give_up()  # nobody could tell whether it is changed
        else:
            self._version = self._input._version
        return out

    def _goes_on(self, place: int, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Called with its predecessor's output as it was, and otherwise like it.

        If not, all blocks run alone for good; those that ran too early write their entries again.
        """
        given = _others(args, kwargs)
        is_turn = place == self._next and args[0] is self._input
        is_alike = len(given) == len(self._given) and all(map(is_, given, self._given))
        if is_turn and is_alike and args[0]._version == self._version:
            return True
        self._give_up()
        return False

    def _give_up(self) -> None:
        self.may.run_together = False
        self._left, self._input, self._given = [], None, []


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _others(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """What a block is called with beside the hidden states."""
    return [*args[1:], *kwargs.values()]


class _StandIn:
    """One block and the cache layer that it owns."""

    def __init__(self, block: nn.Module, layer: int):
        self.block = block
        self.layer = layer
        self.call: AttentionCall | None = None

    @classmethod
    def of(cls, block: nn.Module) -> _StandIn | None:
        """None for a block without exactly one attention layer, or with a forward of its own."""
        found = {m.layer_idx for m in block.modules() if hasattr(m, "layer_idx")}
        if len(found) != 1 or "forward" in block.__dict__:
            return None
        return cls(block, found.pop())  # type: ignore[arg-type]

    def bind(self, group: _Group, place: int) -> Callable:
        def forward(*args, **kwargs):
            if not args:
                args = (kwargs.pop("hidden_states"),)
            rest = dict(kwargs)
            state: PackedState = rest.pop(KEYWORD)
            if not self.is_known(state):
                out = self._first(args, kwargs)
                group.watch(place, args, rest, out)
                return out
            if group.may.run_together and place:
                found = group.take(place, args, rest)
                if found is not None:
                    return found
            if group.may.run_together and all(m.is_known(state) for m in group.members):
                return group.start(args, rest, state)
            return group.run([self.block], [self.step(state)], args, rest)[0]

        return forward

    def is_known(self, state: PackedState) -> bool:
        """Whether a forward with this pool has shown what the layer's attention asks for."""
        return self.call is not None and self.layer in state.pool.layers

    def step(self, state: PackedState) -> LayerStep:
        """The layer's share of a forward."""
        assert self.call is not None
        key, value = state.pool.layers[self.layer]
        return state.step.layer(key, value, self.call.groups, self.call.sliding_window)

    def _first(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A pool's first forward finds out its widths, and what the layer's attention asks for."""
        state: PackedState = kwargs[KEYWORD]
        calls = {} if state.calls is None else state.calls
        own = kwargs | {KEYWORD: state._replace(calls=calls)}
        out = type(self.block).forward(self.block, *args, **own)
        self.call = calls.get(self.layer)
        return out
