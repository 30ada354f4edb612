"""What the tests of kernels share: where they run, and how close they have to be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Nothing traces the interpreter's kernels; `test_tracing` does that with real ones.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Inside, interpreted kernels round to bfloat16 as devices do; the interpreter cuts off."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if not (source.is_fp32() and target.is_bf16()):
            return convert(data, source, target, mode)
        wide = torch.from_numpy(data.copy()).view(torch.float32)
        return wide.bfloat16().view(torch.int16).numpy().view("uint16")

    with mock.patch.object(interpreter, "_convert_float", rounded):
        yield


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors where kernels run."""
    return [tensor.to(DEVICE) for tensor in tensors]


def generator(seed: int) -> torch.Generator:
    """Seeded noise that does not depend on the device."""
    return torch.Generator().manual_seed(seed)


def random_parents(source: random.Random, nodes: int, kind: str = "random") -> list[int]:
    """Parents before children: a random tree, a chain or a star."""
    if kind == "chain":
        return [i - 1 for i in range(nodes)]
    return [-1 if kind == "star" else source.randint(-1, i - 1) for i in range(nodes)]


def depths_of(parents: list[int]) -> list[int]:
    """1 for children of the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def assert_as_close(
    found: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor, times: float = 3.0
) -> None:
    """The kernel errs at most a few times as much as the reference does.

    ``exact`` is what the reference gives on the same inputs in float64. The floor is the rounding
    of the result itself.
    """
    error = (found.cpu().double() - exact).abs().max()
    floor = torch.finfo(found.dtype).eps * float(exact.abs().max())
    allowed = times * max(float((reference.double() - exact).abs().max()), floor)
    assert float(error) <= allowed, (float(error), allowed)
