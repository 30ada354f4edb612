"""The unrolled drafter's depths, compiled: one graph each, forward and backward.

Every depth sees one more set of private keys, so each is a function of its own; sizes of runs and
contexts are symbolic. What cannot be compiled (a drafter behind hooks, for example) runs as it is.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.fx.experimental import _config as fx_config

from ..drafter.model import Eagle4Drafter
from ..engine import graphs
from .ttt import unroll_depth

_made: WeakKeyDictionary[Eagle4Drafter, list[_Depth]] = WeakKeyDictionary()


def compiled_depths(drafter: Eagle4Drafter, num_depths: int) -> list[_Depth]:
    """`ttt.unroll_depth` for every depth; the same ones in every call for this drafter."""
    made = _made.setdefault(drafter, [])
    while len(made) < num_depths:
        made.append(_Depth())
    return made


class _Depth:
    """One depth; equal sizes are a coincidence to it, not a law to be guarded."""

    def __init__(self) -> None:
        self._run = graphs.compiled(unroll_depth)

    def __call__(self, *args):
        with fx_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return self._run(*args)
