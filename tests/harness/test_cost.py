"""Catches: latencies that fall with more rows, interpolation off the grid lines, a factor that
follows one outlier or never follows a real change, plain decoding that looks fast because only
verification was measured on a slow moment, frozen tables that learn.
"""

from __future__ import annotations

import json
from random import Random

import pytest

from eagle4.harness import CostTable
from eagle4.harness.monotone import non_decreasing
from eagle4.harness.surface import Surface
from profiling.world import CPU, MS


def test_monotone_regression_pools_what_is_out_of_order():
    assert non_decreasing([1, 3, 2, 4], [1, 1, 1, 1]) == [1, 2.5, 2.5, 4]
    assert non_decreasing([3, 2, 1], [1, 1, 2]) == [1.75, 1.75, 1.75]
    assert non_decreasing([1, 2, 3], [5, 1, 5]) == [1, 2, 3]


def test_the_surface_is_bilinear_inside_and_linear_beyond():
    surface = Surface([1, 3], [10, 20], [[10.0, 20.0], [30.0, 60.0]])
    assert surface.at(1, 10) == 10 and surface.at(3, 20) == 60
    assert surface.at(2, 15) == (10 + 20 + 30 + 60) / 4
    assert surface.at(5, 10) == 50  # the slope goes on
    assert surface.at(3, 30) == 90
    assert surface.at(0, 0) == 10  # below the grid: its first point
    assert sum(weight for _, _, weight in surface.corners(2, 13)) == pytest.approx(1)


def test_smoothing_makes_both_directions_monotone():
    noisy = Surface([1, 2, 4], [1, 2], [[5.0, 4.0], [4.0, 9.0], [8.0, 7.0]]).smoothed()
    assert all(b >= a for line in noisy.ns for a, b in zip(line, line[1:], strict=False))
    columns = zip(*noisy.ns, strict=True)
    assert all(b >= a for c in columns for a, b in zip(c, c[1:], strict=False))


@pytest.mark.parametrize(
    ("rows", "contexts", "ns"),
    [
        ([2, 1], [1], [[1.0], [2.0]]),
        ([1, 2], [1], [[1.0]]),
        ([1], [1], [[0.0]]),
        ([1], [1], [[float("nan")]]),
        ([], [1], []),
    ],
)
def test_impossible_grids_are_refused(rows, contexts, ns):
    with pytest.raises(ValueError):
        Surface(rows, contexts, ns)


def test_verification_starts_at_the_plain_round_and_respects_buckets():
    table = CPU.table(buckets=(1, 8, 16))
    curve = table.verify_curve(1, 15, 1)
    assert curve[0] == table.cost_ns("plain", 1, 1)
    assert curve[1] == curve[7] < curve[8] == curve[15]
    assert curve == sorted(curve)
    assert CPU.table().verify_curve(4, 3, 1)[3] == CPU.verify(7)


def test_one_outlier_moves_nothing_and_a_change_is_followed():
    table = CPU.table()
    level = table.cost_ns("level", 1, 1)
    for repeat in range(20):
        table.refine("level", 1, 1, level * (30 if repeat == 9 else 1))
    assert table.cost_ns("level", 1, 1) == pytest.approx(level, rel=0.02)
    for _ in range(12):
        table.refine("level", 1, 1, 3 * level)
    assert table.cost_ns("level", 1, 1) == pytest.approx(3 * level, rel=0.1)
    assert table.cost_ns("verify", 1, 1) == CPU.verify(1), "only the drafter got slower"


def test_a_slow_machine_slows_plain_and_verification_alike():
    table = CPU.table()
    for _ in range(12):
        table.refine_verify(1, 8, 1, 2 * CPU.verify(9))
    assert table.cost_ns("plain", 1, 1) == pytest.approx(2 * CPU.verify(1), rel=0.05)


def test_a_wrong_shape_is_corrected_grid_point_by_grid_point():
    table = CPU.table()
    for _ in range(400):
        table.refine("verify", 1, 1, CPU.verify(1))
        table.refine("verify", 16, 1, int(1.3 * CPU.verify(16)))
        table.refine("plain", 1, 1, CPU.verify(1))
    ratio = table.cost_ns("verify", 16, 1) / table.cost_ns("verify", 1, 1)
    assert ratio == pytest.approx(1.3 * CPU.verify(16) / CPU.verify(1), rel=0.1)


def test_a_frozen_table_does_not_learn():
    table = CPU.table(frozen=True)
    for _ in range(20):
        table.refine("level", 1, 1, 100 * MS)
    table.settle()
    assert table.cost_ns("level", 1, 1) == CPU.level(1) and table.version == 0


def test_a_missing_surface_is_named():
    with pytest.raises(ValueError, match="finish"):
        CostTable({kind: Surface.linear(1, 1) for kind in ("verify", "plain", "root", "level")})


def _rounds_of(table, true_ns, rounds, seed, load=8):
    """Verifications of 2 to 30 nodes whose true cost is ``true_ns(nodes)``, with 5 % of noise."""
    random = Random(seed)
    for _ in range(rounds):
        nodes = random.randint(2, 30)
        table.refine_verify(load, nodes, 1, int(true_ns(nodes) * random.gauss(1, 0.05)))


@pytest.mark.parametrize("steep", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("extra", [0.0, 0.2])
def test_what_nodes_add_is_learned_from_rounds_of_many_sizes(steep, extra):
    table = CPU.table()
    plain = table.cost_ns("plain", 8, 1)
    row = (table.verify_curve(8, 30, 1)[30] - table.verify_curve(8, 10, 1)[10]) / 20
    _rounds_of(table, lambda nodes: (1 + extra) * plain + steep * row * nodes, 300, seed=1)
    curve = table.verify_curve(8, 30, 1)
    assert (curve[30] - curve[10]) / 20 == pytest.approx(steep * row, rel=0.15)
    assert curve[20] == pytest.approx((1 + extra) * plain + steep * row * 20, rel=0.03)
    assert table.node_line(2).slope == 1, "other loads have lines of their own"


def test_a_machine_that_is_slow_altogether_is_no_steeper_line():
    table = CPU.table()
    before = table.verify_curve(8, 30, 1)
    _rounds_of(table, lambda nodes: 2 * before[nodes], 60, seed=2)
    curve = table.verify_curve(8, 30, 1)
    assert table.cost_ns("plain", 8, 1) == pytest.approx(2 * before[0], rel=0.1)
    assert curve[20] == pytest.approx(2 * before[20], rel=0.05)


def test_a_frozen_table_learns_no_line():
    table = CPU.table(frozen=True)
    before = table.verify_curve(8, 30, 1)
    _rounds_of(table, lambda nodes: 3 * before[nodes], 60, seed=3)
    assert table.verify_curve(8, 30, 1) == before


def test_lines_outlast_a_process():
    table = CPU.table()
    before = table.verify_curve(8, 30, 1)
    _rounds_of(table, lambda nodes: before[0] + (before[nodes] - before[0]) // 2, 200, seed=4)
    again = CostTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again.node_line(8).slope == pytest.approx(table.node_line(8).slope, rel=0.02)
    assert again.node_line(8).sums == table.node_line(8).sums
    old = {key: value for key, value in table.to_dict().items() if key != "node_lines"}
    assert CostTable.from_dict(old).node_line(8).slope == 1
    for wrong in ([1.0], [float("nan")] * 5, [-30.0, 0, 0, 0, 0]):
        with pytest.raises(ValueError, match="five finite"):
            CostTable.from_dict({**table.to_dict(), "node_lines": {"4": wrong}})


def test_stalls_do_not_drive_factor_line_and_shape_apart():
    """One-sided noise: medians do not see it, means do; together they once ran away."""
    random, table = Random(5), CPU.table()
    before = table.verify_curve(1, 8, 1)
    for _ in range(3000):
        nodes = random.randint(2, 8)
        stall = random.uniform(1.2, 1.9) if random.random() < 0.15 else 1.0
        table.refine_verify(1, nodes, 1, int(before[nodes] * random.gauss(1, 0.03) * stall))
    curve = table.verify_curve(1, 8, 1)
    assert curve[0] == pytest.approx(before[0], rel=0.1)
    assert curve[8] - curve[0] == pytest.approx(before[8] - before[0], rel=0.25)
    assert not table.is_off
