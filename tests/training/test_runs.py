"""Can catch: noise that depends on how a step is shared out, repeats, exceeds its bound or its
tap's scale, or reaches the teacher."""

import dataclasses

import pytest
import torch

from eagle4.training.settings import TrainConfig
from eagle4.training.step import micro_batches
from tests.training.small import tiny_store, tiny_target

BATCH = [(0, 10), (1, 12), (2, 9), (3, 20), (4, 11)]
CONFIG = TrainConfig(num_anchors=6, num_depths=2, batch_size=5, feature_noise=0.1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("store"), tiny_target())


def features(store, world=1, accumulation=1, step=3, **settings):
    """Features of every run of the batch, whoever had them; and all teachers."""
    config = dataclasses.replace(CONFIG, accumulation=accumulation, **settings)
    found, teachers = {}, {}
    for rank in range(world):
        parts = micro_batches(store, BATCH, rank, world, config, torch.device("cpu"), step)
        for i, runs in enumerate(parts):
            if runs.valid_BKM.any():
                numbers = range(len(BATCH))[i * world + rank :: world * accumulation]
                pieces = runs.feature_NTH.split(runs.length_B.tolist())
                found |= dict(zip(numbers, pieces, strict=True))
                teachers |= dict(zip(numbers, runs.teacher_BJH, strict=True))
    return [found[i] for i in range(len(BATCH))], [teachers[i] for i in range(len(BATCH))]


def test_noise_is_bounded_by_each_taps_scale_and_spares_the_teacher(store):
    clean, clean_teachers = features(store, feature_noise=0.0)
    noisy, teachers = features(store)
    for a, b in zip(clean, noisy, strict=True):
        share = (b - a).abs() / a.square().mean(-1, keepdim=True).sqrt()
        assert share.max() <= 0.1 + 1e-5
        assert share.mean() == pytest.approx(0.05, rel=0.05)
        assert (b - a).mean().abs() < 0.01 * a.abs().mean()
    assert all(map(torch.equal, clean_teachers, teachers))


@pytest.mark.parametrize(("world", "accumulation"), [(2, 1), (1, 2), (2, 3), (7, 1)])
def test_noise_does_not_depend_on_who_computes(store, world, accumulation):
    noisy, _ = features(store)
    shared, _ = features(store, world, accumulation)
    assert all(map(torch.equal, noisy, shared))


def test_noise_is_new_in_every_step_and_run(store):
    clean, _ = features(store, feature_noise=0.0)
    drawn = []
    for step in (3, 4):
        for a, b in zip(clean, features(store, step=step)[0], strict=True):
            scale = a.square().mean(-1, keepdim=True).sqrt()
            drawn.append(((b - a) / scale)[:5, 0].flatten().round(decimals=3))
    for i, one in enumerate(drawn):
        assert not any(torch.equal(one, other) for other in drawn[:i])
