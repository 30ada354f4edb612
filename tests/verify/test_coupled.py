"""Catches: a coupled choice whose law is not softmax(scores) (F7): noise added to the wrong thing,
with the wrong sign or scale, or to a masked token; a choice that depends on anything but seed and
position; scores that are no law and are served.

The law is integrated, not sampled. Token i wins the race of exponential clocks E_j / p_j at E_i
exactly if every other clock lies beyond a threshold; the thresholds are found by bisection on the
real choice, and E_i is integrated with Gauss-Laguerre nodes.
"""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from eagle4 import sampling
from eagle4.verify import choose_coupled


def wins(monkeypatch, score_V: torch.Tensor, clock_V: torch.Tensor) -> int:
    """The choice when the noise is that of these exponential clocks."""
    noise = -clock_V.log()
    monkeypatch.setattr(sampling, "gumbel", lambda key, token: noise[token])
    return int(choose_coupled(score_V, key=1, position=0))


def threshold(monkeypatch, score_V: torch.Tensor, i: int, clock: float, j: int) -> float:
    """The largest clock of j that still beats i; all others never ring."""

    def beats(log_clock: float) -> bool:
        clock_V = torch.full_like(score_V, 1e300, dtype=torch.float64)
        clock_V[i], clock_V[j] = clock, math.exp(log_clock)
        return wins(monkeypatch, score_V, clock_V) == j

    low, high = -80.0, 80.0
    if not beats(low):
        return 0.0
    for _ in range(52):
        middle = (low + high) / 2
        low, high = (middle, high) if beats(middle) else (low, middle)
    return math.exp(low)


@pytest.mark.parametrize("case", [[0.3, 0.0, 0.6], [0.4, float("-inf"), 0.2]])
def test_the_law_of_the_choice_is_the_softmax(monkeypatch, case):
    score_V = torch.tensor(case)
    nodes, weights = numpy.polynomial.laguerre.laggauss(26)
    law = []
    for i in range(len(case)):
        total = 0.0
        for clock, weight in zip(nodes, weights, strict=True):
            if not math.isfinite(case[i]):
                break
            others = [j for j in range(len(case)) if j != i]
            beyond = sum(threshold(monkeypatch, score_V, i, clock, j) for j in others)
            total += weight * math.exp(-beyond)
        law.append(total)
    wanted = score_V.double().softmax(0)
    assert (torch.tensor(law, dtype=torch.float64) - wanted).abs().max() < 1e-10


def test_it_depends_on_key_and_position_alone():
    score_V = torch.randn(50, generator=torch.Generator().manual_seed(0))
    first = [int(choose_coupled(score_V, 5, position)) for position in range(40)]
    again = [int(choose_coupled(score_V.clone(), 5, p)) for p in reversed(range(40))]
    assert first == again[::-1]
    assert first != [int(choose_coupled(score_V, 6, position)) for position in range(40)]
    assert len(set(first)) > 10


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_law_raise_what_multinomial_raises(value):
    score_V = torch.tensor([0.0, value, 1.0])
    with pytest.raises(RuntimeError, match="inf.*nan"):
        torch.multinomial(score_V.softmax(0), 1)
    with pytest.raises(RuntimeError, match="inf.*nan"):
        choose_coupled(score_V, 1, 0)
    with pytest.raises(RuntimeError, match="inf.*nan"):
        choose_coupled(torch.full((3,), float("-inf")), 1, 0)
