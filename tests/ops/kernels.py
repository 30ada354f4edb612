"""What the tests of kernels share: where they run, and how close they have to be."""

from __future__ import annotations

import random

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Nothing traces the interpreter's kernels; `test_tracing` does that with real ones.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


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
