"""Can catch: a dry run that writes files, or counts that are not the run's."""

from eagle4.training.estimate import estimate
from tests.training.small import tiny_drafter, tiny_store, tiny_target
from tests.training.test_trainer import QUICK


def test_counts_are_the_runs(tmp_path):
    target = tiny_target()
    store = tiny_store(tmp_path / "store", target)
    before = sorted(tmp_path.rglob("*"))
    config = tiny_drafter(target, candidate_rank=4, num_candidates=8).config
    found = estimate(target, config, store, QUICK)
    drafter = tiny_drafter(target, candidate_rank=4, num_candidates=8)
    trained = sum(p.numel() for n, p in drafter.named_parameters() if "efficient" not in n)
    assert found["trained_parameters"] == trained
    assert found["parameters"] == sum(p.numel() for p in drafter.parameters())
    assert found["sequences"] == len(store) and found["steps_per_epoch"] > 0
    assert found["rows_per_step"] == 2 * 8 * 3
    assert found["state_bytes"] > 4 * 4 * trained, "weights, gradients, average, moments"
    assert found["seconds_per_step"] > 0 and found["rows_per_second"] > 0
    assert sorted(tmp_path.rglob("*")) == before
