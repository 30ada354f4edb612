"""A recorder for the CPU: it replays by running the function again, under stricter rules.

As with CUDA graphs, only buffers and static tensors are read, outputs lie in places that another
replay overwrites (here with junk), and the host must not look at a tensor or bring values of its
own while it records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle4.engine import launch

LOOKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy")
# Results whose size or value the host has to wait for, and values that come from the host.
FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh")


class HostAccess(AssertionError):
    """What would break a capture, or freeze a value into it."""


class _Guard(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        is_masked = name.startswith("index") and any(
            isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1])
        )
        if is_masked or any(name.startswith(word) for word in FORBIDDEN):
            raise HostAccess(f"aten::{name} while recording")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_access() -> Iterator[None]:
    """Raises `HostAccess` for looks at tensors and for values from the host."""

    def refuse(name: str) -> Callable:
        def look(*args, **kwargs):
            raise HostAccess(f"Tensor.{name} while recording")

        return look

    with pytest.MonkeyPatch.context() as patch, _Guard():
        for name in LOOKS:
            patch.setattr(torch.Tensor, name, refuse(name))
        yield


class CpuRecorder:
    """Stands in for `recorder.CudaRecorder`."""

    def __init__(
        self, device: torch.device | None = None, warms_up: bool = True, guards: bool = True
    ):
        self.device, self.warms_up, self.guards = device, warms_up, guards
        self.recorded = self.replayed = 0
        self._outputs: list[torch.Tensor] = []

    def record(self, run: Callable[[], Any], fill: Callable[[], None]) -> tuple[Any, Callable]:
        fill()
        warm = [tensor.clone() for tensor in _tensors(run())]
        fill()
        with no_host_access() if self.guards else nullcontext():
            out = run()
        for one, other in zip(warm, _tensors(out), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        # Outputs that were inputs are buffers, which have to be filled before a replay anyway.
        with torch.inference_mode(False):
            places = [tensor.clone() for tensor in _tensors(out)]
        self._outputs += places
        self.recorded += 1
        found = _like(out, iter(places))
        del out

        def replay() -> None:
            self.replayed += 1
            new = _tensors(run())
            for tensor in self._outputs:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
            for place, tensor in zip(places, new, strict=True):
                place.copy_(tensor)

        return found, replay


def _tensors(out: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def _like(out: Any, places: Iterator[torch.Tensor]) -> Any:
    if isinstance(out, torch.Tensor):
        return next(places)
    if not isinstance(out, tuple):
        return out
    parts = [_like(part, places) for part in out]
    return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)


def record_on_cpu(monkeypatch, guards: bool = True) -> list[CpuRecorder]:
    """``launch="graphs"`` works on the CPU from now on; the recorders that are made.

    Compiled functions do not run under guards.
    """
    made: list[CpuRecorder] = []

    def make(device: torch.device, warms_up: bool) -> CpuRecorder:
        made.append(CpuRecorder(device, warms_up, guards))
        return made[-1]

    monkeypatch.setattr(launch, "RECORDED", ("cpu", "cuda"))
    monkeypatch.setattr(launch, "CudaRecorder", make)
    return made
