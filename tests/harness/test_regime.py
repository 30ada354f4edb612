"""Catches: what was held against speculation once being held against it for ever."""

from __future__ import annotations

from eagle4.harness.fixed_point import ONE
from eagle4.harness.regime import UNIT, Regime


def wait_for_probe(regime: Regime) -> None:
    for _ in range(1000):
        if regime.decide(0, 1000):
            return
    raise AssertionError("no probe")


def test_broken_promises_of_the_beginning_do_not_end_a_good_probe():
    regime = Regime.start(1, UNIT // 2, UNIT // 5, 2048, 100, 0, 1000)
    rounds = 0
    while regime.decide(0, 1000):
        regime.record(-UNIT // 2, 1, 100, [(7 * ONE // 10, False)])
        rounds += 1
    assert rounds == 4  # (0.3 / 0.86)^4 = 0.015, (0.3 / 0.86)^3 = 0.042
    for _ in range(4):
        wait_for_probe(regime)
        regime.record(-UNIT // 4, 1, 100, [(ONE // 2, False)])
        assert not regime.decide(0, 1000)
    wait_for_probe(regime)
    for _ in range(8):
        regime.record(UNIT, 3, 100, [(9 * ONE // 10, True)])
        assert regime.decide(0, 1000)


def test_two_misses_of_a_sure_drafter_prove_nothing():
    """A chain of sure nodes is lost whole; its nodes are no independent witnesses."""
    for hits in ([False, False], [True, False, False, False], [True, True] + [False] * 4):
        regime = Regime.start(1, UNIT, UNIT // 5, 3000, 100, 0, 1000)
        for hit in hits:
            regime.record(-2 * UNIT // 3 if not hit else UNIT, 1 + hit, 100, [(ONE, hit)])
            assert regime.decide(0, 1000), hits


def test_no_number_of_misses_outlasts_what_fits_later():
    regime = Regime.start(8, UNIT, UNIT // 5, 3000, 100, 0, 1000)
    for hit in [False] * 40 + [True] * 10:
        regime.record(0, 1, 100, [(ONE, hit)])
    assert regime.odds > ONE
