"""Catches: ranks whose cost tables part, because they start apart or because every rank learns from
its own clock; a measurement that is applied at once, twice or never."""

from __future__ import annotations

import copy
import random

import pytest

from eagle4.config import SpeculativeConfig
from eagle4.harness import CostTable, HarnessPolicy
from eagle4.harness.agreed import AGREE_ROUNDS, AgreedTable
from profiling.rivals import HarnessRun
from profiling.world import CPU, Process


def scaled(factor: float, **options) -> CostTable:
    table = CPU.table(**options)
    for surface in table.surfaces.values():
        surface.ns = [[factor * ns for ns in line] for line in surface.ns]
    return table


def together(tables: list[CostTable]) -> tuple[list[AgreedTable], list[list[list[int]]]]:
    """One agreed table per rank. What a rank exchanges is noted and answered from the last rank."""
    sent: list[list[list[int]]] = [[] for _ in tables]

    def largest(rank: int):
        def answer(values: list[int]) -> list[int]:
            sent[rank].append(values)
            return values

        return answer

    return [AgreedTable(copy.deepcopy(tables), largest(r)) for r in range(len(tables))], sent


def test_the_start_is_the_slowest_rank_of_every_part():
    slow = scaled(1.0)
    slow.surfaces["level"].ns = [[9 * ns for ns in line] for line in slow.surfaces["level"].ns]
    (agreed, _), _ = together([slow, scaled(2.0)])
    assert agreed.cost_ns("level", 4, 256) == slow.cost_ns("level", 4, 256)
    assert agreed.cost_ns("plain", 1, 256) == scaled(2.0).cost_ns("plain", 1, 256)


def test_grids_that_differ_are_refused():
    other = scaled(1.0)
    other.surfaces["verify"].rows[-1] += 1
    with pytest.raises(ValueError, match="'verify' on different grids"):
        together([scaled(1.0), other])


def test_measurements_wait_for_the_same_round_and_are_then_applied_once():
    (agreed,), (sent,) = together([scaled(1.0)])
    alone = scaled(1.0)
    for turn in range(3 * AGREE_ROUNDS):
        before = agreed.version
        for table in (agreed, alone):
            table.refine("level", 4, 256, 3 * alone.cost_ns("level", 4, 256))
            table.refine_verify(1, 8, 256, 10**8)
        is_due = (turn + 1) % AGREE_ROUNDS == 0
        assert len(sent) == (turn + 1) // AGREE_ROUNDS
        assert is_due or agreed.version == before
    assert agreed.factors == alone.factors and agreed.surfaces == alone.surfaces
    assert agreed.factors["target"] != 1.0


def test_a_frozen_table_of_one_rank_freezes_all_and_exchanges_nothing():
    (agreed, _), sent = together([scaled(1.0), scaled(1.0, frozen=True)])
    before = copy.deepcopy(agreed.surfaces)
    for _ in range(2 * AGREE_ROUNDS):
        agreed.refine_plain(1, 256, 10**9)
    assert agreed.frozen and agreed.surfaces == before and sent == [[], []]


def decisions(seed: int, exchange) -> dict:
    """What a policy decided in 500 rounds, some of them rests, while its clock was shaken."""
    policy = HarnessPolicy(SpeculativeConfig(), AgreedTable([scaled(1.0)], exchange))
    noise, timed, observe = random.Random(seed), policy.timed, policy.observe

    def shake(ns: int) -> int:
        return int(ns * noise.uniform(0.5, 3.0))

    policy.timed = lambda kind, rows, ns: timed(kind, rows, shake(ns))  # type: ignore
    policy.observe = lambda tokens, ns: observe(  # type: ignore
        tokens, {name: shake(value) for name, value in ns.items()}
    )
    run = HarnessRun(policy, CPU, 1, seed=5)
    run.rounds(Process.mixed(1.0), 100)
    run.rounds(Process.mixed(0.03), 400)
    policy.finish()
    assert policy.report.rounds["plain"] > 20
    report = {k: v for k, v in policy.report.to_dict().items() if k != "ms"}
    lines = {size: line.sums for size, line in policy.table._lines.items()}
    assert any(rounds > 10 for rounds, *_ in lines.values()), "nothing was learned"
    return {**report, "factors": policy.table.factors, "lines": lines}


def test_ranks_with_clocks_of_their_own_decide_alike():
    exchanged: list[list[int]] = []
    first = decisions(1, lambda values: exchanged.append(values) or values)
    answers = iter(exchanged)
    assert decisions(2, lambda values: next(answers)) == first and len(exchanged) > 5
    assert decisions(3, lambda values: values) != first, "clocks do change decisions"
