"""Catches: ranks that part or hang because their logits differ in the last bits, because each
measures its own times, because one is slow, or because each looks at its own clock or generator."""

from __future__ import annotations

import pytest

from tests.parallel import unrest
from tests.parallel.world import run_world


@pytest.mark.parametrize(
    ("size", "runs"),
    [(2, 25), *(pytest.param(size, 200, marks=pytest.mark.slow) for size in (2, 4))],
)
def test_near_ties_own_costs_and_a_slow_rank_change_nothing(size, runs):
    found = run_world(size, unrest.near_ties, runs, limit_s=1200.0)
    assert all(own["ids"] == found[0]["ids"] for own in found)
    assert len(found[0]["ids"]) == runs and found[0]["levels"] > runs
    # The tables were agreed, refined and stayed equal.
    assert all(own["surfaces"] == found[0]["surfaces"] for own in found)
    assert all(own["factors"] == found[0]["factors"] for own in found)
    assert any(factor != 1.0 for factor in found[0]["factors"].values())


def test_without_the_agreement_ranks_part():
    agreed = run_world(2, unrest.disagreement, True)
    assert agreed[0] == agreed[1]
    apart = run_world(2, unrest.disagreement, False)
    assert apart[0] != apart[1], "this test could not fail"


def test_clocks_and_generators_of_the_first_rank_count():
    found = run_world(2, unrest.own_clocks)
    assert found[0] == found[1]
    assert len(found[0][1][0]) > 7, "the call did not end at the second rank's clock"
