"""Arguments of recorded functions, taken apart: tensors to copy, tensors that stay, the rest.

Arguments are tensors, tuples and NamedTuples of arguments, constants, and objects (modules) that
are only equal to themselves. Names of arguments and fields say which tensors are static.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_CONSTANTS = (int, float, str, bool, type(None), torch.dtype, torch.device, frozenset)


class Same:
    """An object as part of a key: equal to itself only."""

    def __init__(self, value: object):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


class Buffer(NamedTuple):
    """Stands for the copied tensor with this index."""

    index: int


def described(
    value: Any, is_static: bool, static: frozenset[str], tensor: Callable[..., Any]
) -> Any:
    """A hashable description; ``tensor(found, is_static)`` describes a tensor."""
    if isinstance(value, torch.Tensor):
        return tensor(value, is_static)
    if isinstance(value, tuple):
        parts = parts_of(value, is_static, static)
        return type(value), *(described(*part, static, tensor) for part in parts)
    return (type(value), value) if isinstance(value, _CONSTANTS) else Same(value)


def mapped(value: Any, is_static: bool, static: frozenset[str], change: Callable[..., Any]) -> Any:
    """The same structure with every tensor replaced by ``change(tensor, is_static)``."""
    if isinstance(value, torch.Tensor):
        return change(value, is_static)
    if not isinstance(value, tuple):
        return value
    return _like(value, [mapped(*p, static, change) for p in parts_of(value, is_static, static)])


def stand_ins(value: Any, is_static: bool, static: frozenset[str], first: Iterator[int]) -> Any:
    """The same structure without its tensors: numbered buffers, and weak references to static ones.

    So it does not keep pools alive.
    """

    def change(tensor: torch.Tensor, is_static: bool) -> Any:
        return weakref.ref(tensor) if is_static else Buffer(next(first))

    return mapped(value, is_static, static, change)


def filled(form: Any, buffers: list[torch.Tensor]) -> Any:
    """A value from its stand-ins."""
    if isinstance(form, Buffer):
        return buffers[form.index]
    if isinstance(form, weakref.ref):
        return form()
    if not isinstance(form, tuple):
        return form
    return _like(form, [filled(part, buffers) for part in form])


def parts_of(value: tuple, is_static: bool, static: frozenset[str]) -> Iterator[tuple[Any, bool]]:
    """The parts of a tuple, and whether they are static."""
    fields = getattr(value, "_fields", None)
    if fields is None:
        return ((part, is_static) for part in value)
    return ((p, is_static or name in static) for p, name in zip(value, fields, strict=True))


def _like(value: tuple, parts: list) -> tuple:
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
