"""Random states for comparing the policy's twins, as nested lists and as tensors."""

from __future__ import annotations

import random

import torch

from eagle4.harness.acceptance import Book
from eagle4.harness.device_policy import DevicePrices
from eagle4.harness.fixed_point import CELLS, DEPTHS, KNOTS, MOST_NS, ONE
from eagle4.harness.policy import Prices


class Shape:
    """Sizes that a group of states shares."""

    def __init__(self, rng: random.Random):
        self.batch = rng.choice((1, 1, 2, 3, 5))
        self.nodes = rng.choice((1, 4, 9, 20))
        self.width = min(rng.choice((1, 2, 4)), self.nodes)
        self.top_k = rng.choice((1, 2, 4))
        self.max_nodes = rng.choice((1, 3, 8, 16))
        self.depth = rng.randint(1, 10)
        self.max_depth = rng.choice((self.depth, self.depth + 1, self.depth + 3, 12))
        self.min_width = rng.choice((1, self.width))

    def depths(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Depth and limit as the tensor twin takes them."""
        return torch.tensor(self.depth, device=device), torch.tensor(self.max_depth, device=device)


def random_book(rng: random.Random) -> Book:
    """Monotone acceptance, any forecast."""

    def share() -> int:
        return rng.choice((0, ONE, rng.randint(0, ONE), rng.randint(0, ONE), rng.randint(0, 99)))

    return Book(
        [sorted(share() for _ in KNOTS) for _ in range(DEPTHS)],
        [[[share() for _ in range(4)] for _ in range(CELLS)] for _ in range(DEPTHS + 1)],
        [0, *(share() for _ in range(DEPTHS + 1))],
    )


def random_states(rng: torch.Generator, shape: Shape, count: int):
    """Pools, frontiers, probabilities and prices of ``count`` rounds: full range, ties, zeros."""

    def integers(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, generator=rng)

    size = (count, shape.batch, shape.nodes)
    pool = torch.where(integers(3, *size) > 0, integers(ONE + 1, *size), integers(3, *size))
    # Coarse values make ties; some nodes may not be verified.
    coarse = (integers(5, *size) * (ONE // 4)).clamp_max(ONE)
    pool = torch.where(integers(2, count, 1, 1) > 0, pool, coarse)
    frontier = pool[..., : shape.width]
    probs = integers(ONE + 1, count, shape.batch, shape.width)
    token_ns = torch.where(
        integers(4, count) > 0, integers(100_000_000, count) + 1, integers(MOST_NS, count) + 1
    )
    rows = shape.batch * shape.max_nodes + 1
    step = torch.where(integers(3, count, rows) > 0, integers(5_000_000, count, rows), 0)
    verify = (
        step + (integers(2, count, rows) * 40_000_000 * (integers(8, count, rows) == 0))
    ).cumsum(1)
    level = integers(9_000_000, count, shape.width + 1).cumsum(1)
    return pool, frontier, probs, DevicePrices(token_ns, verify + 1, level)


def prices_of(prices: DevicePrices, z: int, max_nodes: int) -> Prices:
    """Round ``z`` as the reference reads it."""
    return Prices(
        int(prices.token_ns_Z[z]),
        prices.verify_ns_ZR[z].tolist(),
        prices.level_ns_ZW[z].tolist(),
        max_nodes,
    )
