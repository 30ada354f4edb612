"""Can catch: compiled depths that compute something else, gradients that stop at a graph's edge, a
graph made anew for every batch, a break inside a depth, a setting that nothing reads."""

from functools import partial

import pytest
import torch

from eagle4.engine.graphs import num_compiled
from eagle4.training.compiled import compiled_depths
from eagle4.training.runs import assemble
from eagle4.training.settings import TrainConfig
from eagle4.training.ttt import unroll
from tests.training.small import tiny_drafter, tiny_store

NUM_ANCHORS, NUM_DEPTHS = 7, 3
BATCHES = ([(0, 8), (1, 20)], [(2, 12), (0, 21), (3, 9)], [(1, 9), (3, 15)])


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    return tiny_store(tmp_path_factory.mktemp("store"), target, num_sequences=4)


def compare(drafter, store, recompute: bool) -> list[int]:
    """Heads and gradients, eager and compiled; how many graphs there were after every batch."""
    depths, made = compiled_depths(drafter, NUM_DEPTHS), []
    assert all(a is b for a, b in zip(depths, compiled_depths(drafter, NUM_DEPTHS), strict=True))
    for batch in BATCHES:
        runs, found = assemble(store, batch, NUM_ANCHORS, NUM_DEPTHS), []
        for steps in (None, depths):
            drafter.zero_grad()
            heads = unroll(drafter, runs, recompute, steps)
            heads.square().sum().backward()
            found.append([heads, *(p.grad for p in drafter.parameters() if p.grad is not None)])
            found[-1] = [tensor.detach().clone() for tensor in found[-1]]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        made.append(num_compiled())
    return made


def fallbacks(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "eagle4"]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "recompute"), [(None, False), (2, False), (2, True)])
def test_compiled_depths_are_the_same_function(
    target, store, monkeypatch, caplog, window, recompute
):
    traced = partial(torch.compile, backend="aot_eager")  # all but Inductor's code
    monkeypatch.setattr(torch, "compile", traced)
    before = num_compiled()
    first, *others = compare(tiny_drafter(target, sliding_window=window), store, recompute)
    assert first - before == NUM_DEPTHS, "one graph for every depth"
    assert set(others) == {first}, "other batches, the same graphs"
    assert not fallbacks(caplog)


@pytest.mark.slow
def test_inductor_computes_the_same(target, store, caplog):
    compare(tiny_drafter(target), store, False)
    assert not fallbacks(caplog)


def test_the_setting_reaches_the_depths(target, store, tmp_path, monkeypatch):
    from eagle4.training.trainer import Trainer

    traced, calls = partial(torch.compile, backend="aot_eager"), []

    def counting(function, **options):
        calls.append(function.__name__)
        return traced(function, **options)

    monkeypatch.setattr(torch, "compile", counting)
    losses = []
    for compile in (False, True):
        torch.manual_seed(0)
        config = TrainConfig(
            **{"steps": 2, "batch_size": 2, "num_anchors": 7, "num_depths": 2},
            **{"compile": compile, "decode_prompts": 0, "precision": "float32"},
        )
        trainer = Trainer(tiny_drafter(target), store, tmp_path / str(compile), config)
        losses.append([trainer.step()["loss"] for _ in range(2)])
        assert calls == ["unroll_depth"] * 2 * compile
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_sharded_weights_are_refused():
    with pytest.raises(ValueError, match="compile"):
        TrainConfig(compile=True, sharding="shard")
