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
    regime = Regime.start(1, UNIT // 2, 2048, 100, 0, 1000)
    rounds = 0
    while regime.decide(0, 1000):
        regime.record(-UNIT // 2, 1, 100, accepted=0, promised_q30=3 * ONE // 2)
        rounds += 1
    assert rounds == 3  # 4.5 promised nodes, none accepted
    for _ in range(4):
        wait_for_probe(regime)
        regime.record(-UNIT // 4, 1, 100, accepted=0, promised_q30=ONE)
        assert not regime.decide(0, 1000)
    wait_for_probe(regime)
    for _ in range(8):
        regime.record(UNIT, 3, 100, accepted=2, promised_q30=2 * ONE)
        assert regime.decide(0, 1000)
