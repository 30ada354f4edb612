"""Can catch: a sweep that changes the drafter, recall that does not grow with rank or candidates, a
frequency weighting that does not weight."""

import dataclasses

import pytest
import torch

from eagle4.training.candidates import candidate_recall, fit_factors, stage_states
from eagle4.training.settings import CandidateConfig
from eagle4.training.sweep import as_table, sweep, with_rank
from eagle4.training.trainer import Trainer
from tests.training.small import HIDDEN, tiny_drafter, tiny_store, tiny_target
from tests.training.test_trainer import QUICK

STAGE = CandidateConfig(steps=0, num_runs=8, num_depths=3, num_frequent=64, num_sampled=0)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    target = tiny_target()
    folder = tmp_path_factory.mktemp("sweep")
    store = tiny_store(folder / "store", target)
    drafter = tiny_drafter(target, candidate_rank=4, num_candidates=8)
    return Trainer(drafter, store, folder / "run", QUICK)


def test_recall_grows_with_rank_and_candidates(trainer):
    drafter = trainer.drafter
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    points = sweep(trainer, drafter, [2, 8, HIDDEN], [2, 16], STAGE)
    assert [(p.rank, p.num_candidates) for p in points] == [
        (rank, count) for rank in (2, 8, HIDDEN) for count in (2, 16)
    ]
    assert all(0 <= p.recall_least <= p.recall_first <= 1 for p in points[-2:])
    assert points[-1].recall_least == 1.0 and points[0].recall_first < points[-1].recall_first
    for narrow, wide in zip(points[::2], points[1::2], strict=True):
        assert narrow.recall_first <= wide.recall_first
    assert all(p.propose_us > 0 and p.full_us > 0 for p in points)
    assert all(torch.equal(before[name], v) for name, v in drafter.state_dict().items())
    assert drafter.config.num_candidates == 8
    assert as_table(points).count("\n") == 7


def test_frequent_tokens_are_recalled_better_when_they_count(trainer):
    """Of two heads of one rank, the weighted one errs less on the tokens that occur."""
    states = torch.cat(stage_states(trainer, trainer.drafter, STAGE)[0])
    common = trainer.frequent[:6]
    errors = []
    for init in ("plain", "frequency", "weighted", "both"):
        drafter = with_rank(trainer.drafter, 4)
        fit_factors(trainer, drafter, states, dataclasses.replace(STAGE, init=init))
        low = drafter.efficient_lm_head(drafter.efficient_lm_head_down_proj(states))
        errors.append((low - drafter.head(states))[:, common].square().mean().item())
    assert errors[1] < errors[0] and errors[3] < errors[2]


def test_keep_changes_nothing_and_other_names_are_refused(trainer):
    drafter = with_rank(trainer.drafter, 4)
    states = stage_states(trainer, drafter, STAGE)[0]
    fit_factors(trainer, drafter, torch.cat(states), STAGE)
    recall = candidate_recall(drafter, states)
    fit_factors(trainer, drafter, torch.cat(states), dataclasses.replace(STAGE, init="keep"))
    assert candidate_recall(drafter, states) == recall
    with pytest.raises(ValueError, match="init must be one of"):
        CandidateConfig(init="random")
