"""Decoder blocks that run through a given function: the seam for compiled blocks.

All blocks of a model are alike but for their weights, so one compiled function serves them all: it
gets the block as an argument and the block's share of the step as plain tensors (`LayerStep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .attention import KEYWORD, AttentionCall, PackedState

RunBlock = Callable[[nn.Module, tuple, dict[str, Any]], Any]


def run_block(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The block's own forward, as its class defines it."""
    return type(block).forward(block, *args, **kwargs)


@contextmanager
def replaced(blocks: Iterable[nn.Module], run: RunBlock | None) -> Iterator[None]:
    """Inside, the blocks run through ``run`` once their K/V pools exist; None changes nothing."""
    stand_ins = [] if run is None else [s for s in map(_StandIn.of, blocks) if s is not None]
    try:
        for stand_in in stand_ins:
            stand_in.block.forward = stand_in.bind(run)  # type: ignore[method-assign]
        yield
    finally:
        for stand_in in stand_ins:
            stand_in.block.__dict__.pop("forward", None)


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

    def bind(self, run: RunBlock) -> Callable:
        def forward(*args, **kwargs):
            state: PackedState = kwargs[KEYWORD]
            if self.call is None or self.layer not in state.pool.layers:
                return self._first(args, kwargs)
            key, value = state.pool.layers[self.layer]
            asked = self.call.groups, self.call.sliding_window
            own = state.step.layer(key, value, *asked)
            return run(self.block, args, kwargs | {KEYWORD: own})

        return forward

    def _first(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A pool's first forward finds out its widths, and what the layer's attention asks for."""
        state: PackedState = kwargs[KEYWORD]
        calls = {} if state.calls is None else state.calls
        out = run_block(self.block, args, kwargs | {KEYWORD: state._replace(calls=calls)})
        self.call = calls.get(self.layer)
        return out
