"""Functions of tensors that are launched once and replayed afterwards, as CUDA graphs are.

A recording belongs to one key: shapes and dtypes of the tensors, identity of modules and of tensors
that stay where they are (K/V pools), values of everything else. It has buffers of its own:

    call -> copy the tensors into the buffers -> replay -> copies of the outputs

A shape that is seen once is not worth a recording: the first call with a key runs directly (and
serves as its warm-up), the second one records. What the function writes to static tensors must
follow from its arguments alone, because it runs more than once for one call; what it writes to
other arguments stays in the buffers. Nothing in it may look at a tensor on the host.

How launches are recorded is a `Recorder`'s business (`recorder.CudaRecorder`).
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..cache.kept import KeptPools
from .leaves import described, filled, mapped, stand_ins

MOST = 64  # keys that one function remembers

logger = logging.getLogger("eagle4")


class Recorder(Protocol):
    """Records launches on one device."""

    def record(self, run: Callable[[], Any], fill: Callable[[], None]) -> tuple[Any, Callable]:
        """What ``run`` returns, and what writes it anew from what the buffers hold then.

        ``fill`` puts the call's values into the buffers, which ``run`` may change. The outputs
        stay the recorder's: another replay may overwrite them. Raises `RuntimeError` where
        ``run`` cannot be recorded.
        """
        ...


class Replays:
    """All recorded functions of one pair.

    ``static``: names of arguments, or of fields of NamedTuples, whose tensors are never copied.
    ``falls_back``: what cannot be recorded runs directly from then on; not among ranks, which
    would differ then. ``most``: keys that every function remembers; the least recently used goes.
    """

    def __init__(
        self,
        recorder: Recorder,
        static: frozenset[str] = frozenset(),
        falls_back: bool = True,
        most: int = MOST,
    ):
        self.recorder = recorder
        self.static = static
        self.falls_back = falls_back
        self.most = most
        self.is_paused = False
        self.pools = {"target": KeptPools(), "draft": KeptPools()}
        self._weights: list = []
        self._functions: list[Replayed] = []
        self._numbers: dict[int, tuple[weakref.ref, int]] = {}  # of static tensors, by id
        self._num_numbered = 0

    def wrap(self, function: Callable, like: Callable) -> Replayed:
        """``function``, recorded; its positional arguments are named as those of ``like``."""
        names = tuple(inspect.signature(like).parameters)
        self._functions.append(Replayed(function, like.__name__, names, self))
        return self._functions[-1]

    @property
    def num_recordings(self) -> int:
        return sum(function.num_recordings for function in self._functions)

    def check(self, *models: nn.Module) -> None:
        """Drop all recordings when weights or modules are others than last time.

        Adapters that are only switched off, or other code that decides anew in every forward, are
        not seen.
        """
        modules = [module for model in models for module in model.modules()]
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        found = [(type(module), len(module._forward_hooks)) for module in modules]
        found += [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]
        if found != self._weights:
            self._weights = found
            for function in self._functions:
                function.entries.clear()
            for kept in self.pools.values():
                kept.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, everything runs directly."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def number(self, tensor: torch.Tensor) -> int:
        """A number that no other static tensor ever had; its recordings go when it goes."""
        found = self._numbers.get(id(tensor))
        if found is None or found[0]() is not tensor:
            self._num_numbered += 1
            gone = partial(_gone, weakref.ref(self), id(tensor), self._num_numbered)
            found = self._numbers[id(tensor)] = weakref.ref(tensor, gone), self._num_numbered
        return found[1]

    def drop(self, place: int, number: int) -> None:
        """A static tensor is gone."""
        if self._numbers.get(place, (None, 0))[1] == number:
            del self._numbers[place]
        for function in self._functions:
            for key in [k for k in function.entries if number in k.static]:
                del function.entries[key]


def _gone(owner: weakref.ref[Replays], place: int, number: int, _: weakref.ref) -> None:
    if (replays := owner()) is not None:
        replays.drop(place, number)


class Key(NamedTuple):
    """What a recording belongs to: ``static`` are the numbers of its static tensors."""

    form: tuple
    static: tuple[int, ...]
    is_inference: bool


class Replayed:
    """One function with its recordings. Outputs are the caller's own."""

    def __init__(self, function: Callable, name: str, names: tuple[str, ...], owner: Replays):
        self.function = function
        self._name, self._names = name, names
        self._owner = owner
        self._fails = False
        self.entries: OrderedDict[Key, _Recording | None] = OrderedDict()  # None: seen once

    @property
    def num_recordings(self) -> int:
        return sum(entry is not None for entry in self.entries.values())

    def __call__(self, *args):
        if self._fails or self._owner.is_paused:
            return self.function(*args)
        moving: list[torch.Tensor] = []
        key = self._key(args, moving)
        if moving and torch.is_autocast_enabled(moving[0].device.type):
            return self.function(*args)  # casts of weights would be cached outside the recording
        if key not in self.entries:
            self.entries[key] = None
            while len(self.entries) > self._owner.most:
                self.entries.popitem(last=False)
            return self.function(*args)
        self.entries.move_to_end(key)
        recording = self.entries[key] or self._record(key, args, moving)
        return self.function(*args) if recording is None else recording(moving)

    def _key(self, args: tuple, moving: list[torch.Tensor]) -> Key:
        static: list[int] = []

        def tensor(found: torch.Tensor, is_static: bool) -> Any:
            if is_static:
                static.append(self._owner.number(found))
                return None
            moving.append(found)
            return found.shape, found.dtype, found.device

        form = tuple(described(*part, self._owner.static, tensor) for part in self._named(args))
        return Key(form, tuple(static), torch.is_inference_mode_enabled())

    def _named(self, args: tuple) -> Iterator[tuple[Any, bool]]:
        names = zip(args, self._names, strict=True)
        return ((value, name in self._owner.static) for value, name in names)

    def _record(self, key: Key, args: tuple, moving: list[torch.Tensor]) -> _Recording | None:
        """None, for good, where that does not work."""
        static, places = self._owner.static, count()
        form = tuple(stand_ins(*part, static, places) for part in self._named(args))
        try:
            recording = _Recording(self.function, form, moving, self._owner.recorder)
        except RuntimeError as error:
            if not self._owner.falls_back:
                raise
            self._fails = True
            self.entries.clear()
            reason = str(error).strip().splitlines()[0]
            logger.warning(
                "%s cannot be recorded here and is launched directly from now on: %s",
                self._name,
                reason,
            )
            return None
        self.entries[key] = recording
        return recording


class _Recording:
    """Buffers, and the launches that read them."""

    def __init__(
        self, function: Callable, form: tuple, moving: list[torch.Tensor], recorder: Recorder
    ):
        with torch.inference_mode(False):  # so that later calls of either kind may write them
            self._buffers = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in moving]

        def run() -> Any:
            return function(*filled(form, self._buffers))

        self._out, self._replay = recorder.record(run, partial(self._fill, moving))

    def __call__(self, moving: list[torch.Tensor]) -> Any:
        self._fill(moving)
        self._replay()
        return mapped(self._out, False, frozenset(), lambda tensor, _: tensor.clone())

    def _fill(self, moving: list[torch.Tensor]) -> None:
        kinds: dict[torch.dtype, tuple[list, list]] = {}
        for buffer, tensor in zip(self._buffers, moving, strict=True):
            pair = kinds.setdefault(tensor.dtype, ([], []))
            pair[0].append(buffer)
            pair[1].append(tensor)
        for buffers, tensors in kinds.values():
            torch._foreach_copy_(buffers, tensors)  # type: ignore
