"""Catches: a policy that rests in plain decoding and is late for a probe, wakes for nothing, misses
a change of the load, or learns something else, twice or never from the rounds it slept through.
"""

from __future__ import annotations

import pytest

from eagle4.config import SpeculativeConfig
from eagle4.harness import HarnessPolicy, controller, regime
from eagle4.types import Load
from profiling.rivals import HarnessRun
from profiling.world import CPU, LINEAR, Process

HOSTILE, GOOD = Process.mixed(0.03), Process.mixed(1.0)


def history(costs, scenes) -> tuple[list[bool], dict, dict, dict, dict]:
    """What was decided in every round of ``(process, batch, rounds)``, and what was learned."""
    policy, decided = HarnessPolicy(SpeculativeConfig(), costs.table()), []
    run, plan = HarnessRun(policy, costs, 1, seed=7), policy.plan

    def note(load: Load):
        decided.append((found := plan(load)).speculative)
        return found

    policy.plan = note  # type: ignore[method-assign]
    for process, batch, rounds in scenes:
        if batch != run.batch:
            run.batch, run.pending = batch, batch
        run.rounds(process, rounds)
    policy.finish()
    learned = policy.experience.to_dict()
    usual = {size: gain for size, (gain, *_) in learned.pop("usual").items()}
    return decided, policy.report.to_dict(), policy.table.to_dict(), learned, usual


@pytest.mark.parametrize(
    ("costs", "scenes"),
    [
        (CPU, [(HOSTILE, 1, 400), (GOOD, 1, 300)]),
        (CPU, [(HOSTILE, 8, 300), (GOOD, 8, 100)]),
        # Sequences end, others begin: in the middle of rests.
        (CPU, [(HOSTILE, n, 37) for n in (4, 3, 2, 1, 2, 4, 5, 8)] + [(GOOD, 3, 100)]),
        (LINEAR, [(GOOD, 1, 53), (GOOD, 2, 21), (GOOD, 1, 9)]),
    ],
)
def test_a_rest_changes_nothing(costs, scenes, monkeypatch):
    rested = history(costs, scenes)
    for module in (regime, controller):
        monkeypatch.setattr(module, "MOST_REST", 0)
    awake = history(costs, scenes)
    assert rested[:4] == awake[:4]
    # What a call promised is noted when it is thought about.
    assert rested[4] == pytest.approx(awake[4], abs=0.02)
    assert 0.3 < rested[0].count(False) / len(rested[0])
    assert sum(rested[1]["rounds"].get(kind, 0) for kind in ("plain", "speculative")) == len(
        rested[0]
    )


def test_the_policy_does_rest(monkeypatch):
    thought = []
    think = regime.Regime.decide
    monkeypatch.setattr(
        regime.Regime, "decide", lambda self, *args: thought.append(1) or think(self, *args)
    )
    decided = history(CPU, [(HOSTILE, 1, 400)])[0]
    assert len(thought) < 0.3 * len(decided)


def test_it_rests_to_the_end_where_no_probe_can_pay():
    last = regime.Regime.start(1, -regime.UNIT, regime.UNIT // 50, 1000, 10, 0, 10)
    assert not last.decide(3 * regime.UNIT, 10)
    last.waited = 1000  # long due and cheap
    assert last.rest(3 * regime.UNIT, 10) == regime.MOST_REST
    assert last.rest(3 * regime.UNIT, 1000) == 0


@pytest.mark.parametrize("values", [[-0.1, 0.0, None], [float("nan"), 0.1, 0.2], [0.1, 0.1, "x"]])
def test_a_profile_with_an_impossible_habit_is_refused(values):
    experience = controller.Experience()
    written = experience.to_dict() | {"usual": {"1": values}}
    with pytest.raises(ValueError):
        controller.Experience.from_dict(written)
