"""Monotone regression: the nearest non-decreasing sequence (pool adjacent violators)."""

from __future__ import annotations

from collections.abc import Sequence


def non_decreasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Weighted least-squares fit that never decreases.

    Weights must be positive. Neighbours that are out of order are replaced by their weighted mean
    until none is left. Source: Ayer et al. 1955 (isotonic regression).
    """
    blocks: list[list[float]] = []  # [mean, weight, length]
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, mass, length = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * mass) / (last[1] + mass)
            last[1] += mass
            last[2] += length
    return [mean for mean, _, length in blocks for _ in range(int(length))]
