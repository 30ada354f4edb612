"""Can catch: a schedule that does not warm up, does not reach its end, or leaves [0, 1]."""

import pytest

from eagle4.training.schedule import lr_scale
from eagle4.training.settings import TrainConfig


def curve(**settings):
    config = TrainConfig(steps=200, warmup_fraction=0.1, final_lr_fraction=0.05, **settings)
    return [lr_scale(config, step / 200) for step in range(201)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_and_end(schedule):
    values = curve(schedule=schedule)
    assert 0 < values[0] < 0.1 and values[10] == pytest.approx(0.5) and max(values) <= 1.0
    assert values[20] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(1.0 if schedule == "constant" else 0.05)
    assert all(a >= b for a, b in zip(values[20:], values[21:], strict=False))


def test_wsd_is_stable_then_falls():
    values = curve(schedule="wsd", decay_fraction=0.25)
    assert values[150] == pytest.approx(1.0) and values[175] == pytest.approx(0.525)


def test_no_warm_up():
    assert lr_scale(TrainConfig(warmup_fraction=0.0), 0.0) == pytest.approx(1.0)
