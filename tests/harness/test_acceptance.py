"""Catches: acceptance that falls with the draft probability, depths that were never reached being
counted, beliefs that no verdict can change or that one verdict overthrows, old domains that are
never forgotten, classes of requests that leak into each other.
"""

from __future__ import annotations

import random

import pytest

from eagle4.harness.acceptance import Calibration, Experience
from eagle4.harness.fixed_point import KNOTS, ONE, interpolate
from eagle4.harness.nodes import Nodes
from eagle4.harness.usual import Usual


def taught(law, count: int = 4000, seed: int = 0, depth: int = 1) -> Calibration:
    rng, calibration = random.Random(seed), Calibration()
    for _ in range(count):
        p = rng.random()
        calibration.observe(round(p * ONE), depth, rng.random() < law(p))
    return calibration


def test_what_was_observed_is_learned():
    calibration = taught(lambda p: 0.5 * p)
    curve = calibration.curves()[0]
    for p in (0.1, 0.3, 0.5, 0.7, 0.9):
        index = min(range(len(KNOTS)), key=lambda i: abs(KNOTS[i] / ONE - p))
        assert curve[index] == pytest.approx(0.5 * KNOTS[index] / ONE, abs=0.06)


def test_acceptance_never_falls_with_the_probability():
    calibration = taught(lambda p: 1 - p, count=500)  # an adversarial drafter
    for line in calibration.curves():
        assert list(line) == sorted(line)


def test_depths_differ_but_share_what_they_have_in_common():
    calibration = taught(lambda p: 0.9 * p)
    rng = random.Random(1)
    for _ in range(2000):
        calibration.observe(round(0.7 * ONE), 2, rng.random() < 0.2)
    curves = calibration.curves()
    at = KNOTS.index(round(0.7 * ONE))
    assert curves[0][at] > 0.5 and curves[1][at] < 0.3
    assert 0.2 < curves[5][at] < 0.7, "an unseen depth believes the average"


def test_a_new_domain_replaces_the_old_one():
    experience = Experience()
    for accepted in (True, False):
        for _ in range(1500):
            experience.observe(ONE // 2, 1, accepted)
            experience.fade(1)
    assert interpolate(experience.book().accept[0], ONE // 2) < 0.1 * ONE


def test_request_classes_start_from_everybody_and_go_their_own_way():
    experience = Experience()
    for _ in range(200):
        experience.observe(ONE // 2, 1, False)
    for _ in range(200):
        experience.observe(ONE // 2, 1, True, "code")
    everybody, code, unknown = (
        interpolate(experience.book(name).accept[0], ONE // 2) for name in ("", "code", "prose")
    )
    assert code > 0.85 * ONE and everybody < 0.6 * ONE and unknown == everybody


def learned(committed: list[int]) -> list[tuple[int, bool]]:
    """(depth, right) of every observation on a small tree."""
    seen: list[tuple[int, bool]] = []
    experience = Experience()
    experience.observe = lambda p, depth, right, name="": seen.append((depth, right))  # type: ignore
    nodes = Nodes([9], experience.book())
    half, few = ONE // 2, ONE // 10
    nodes.add_level([[-1]], [[half, few]])  # tokens 10, 11
    nodes.add_level([[0, 1]], [[half, few, half, few]])  # 20, 21 under 10; 30, 31 under 11
    nodes.add_level([[2]], [[half, few]])  # 40, 41 under 20
    nodes.learn(0, [10, 11, 20, 21, 30, 31, 40, 41], committed, experience, "")
    return seen


def test_only_children_of_accepted_nodes_count():
    assert learned([99]) == [(1, False), (1, False)]
    assert learned([11, 31, 5]) == [(1, False), (1, True), (2, False), (2, True)]
    assert learned([10, 21]) == [(1, True), (1, False), (2, False), (2, True)]
    assert learned([10, 20, 41, 7])[-2:] == [(3, False), (3, True)]


def test_reliability_reports_what_happened():
    rows = taught(lambda p: 0.8 * p, count=8000).reliability()
    assert sum(row["trials"] for row in rows) == pytest.approx(8000)
    for row in rows[3:]:
        assert row["observed"] == pytest.approx(0.8 * row["probability"], abs=0.1)
        assert row["calibrated"] == pytest.approx(row["observed"], abs=0.06)


def test_the_forecast_learns_what_children_look_like():
    experience = Experience()
    for _ in range(100):
        experience.forecast.observe(1, round(0.9 * ONE), [round(0.8 * ONE), round(0.1 * ONE)], True)
        experience.forecast.observe(
            1, round(0.2 * ONE), [round(0.3 * ONE), round(0.2 * ONE)], False
        )
    book = experience.book()
    from eagle4.harness.fixed_point import cell

    sure, unsure = cell(round(0.9 * ONE)), cell(round(0.2 * ONE))
    assert book.forecast[1][sure][0] == pytest.approx(0.8 * ONE, rel=0.05)
    assert book.forecast[1][unsure][0] == pytest.approx(0.3 * ONE, rel=0.1)
    assert book.chain[2] == pytest.approx(0.8 * ONE, rel=0.05)


def test_experience_survives_json():
    experience = Experience()
    experience.observe(ONE // 3, 2, True, "code")
    experience.usual |= {1: Usual(0.25, 0.1, 0.3), 4: Usual(-0.5)}
    again = Experience.from_dict(experience.to_dict())
    assert again.book("code") == experience.book("code") and again.usual == experience.usual
