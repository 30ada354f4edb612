"""Can catch: factors that are not the best of their rank, a weighting that does not weight, other
weights that move in the candidate stage, recall counted wrongly."""

import pytest
import torch

from eagle4.training.candidates import (
    candidate_recall,
    draft_states,
    init_candidate_head,
    low_rank_factors,
    train_candidate_head,
)
from eagle4.training.runs import assemble
from eagle4.training.settings import CandidateConfig
from tests.training.small import HIDDEN, tiny_drafter, tiny_store, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, target):
    store = tiny_store(tmp_path_factory.mktemp("store"), target)
    return [assemble(store, [(0, 8), (1, 9), (2, 10), (3, 8)], 20, 3)]


def skewed(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -3, HIDDEN)
    return torch.randn(count, HIDDEN, generator=generator) * scale


def test_plain_factors_are_the_truncated_svd():
    weight = torch.randn(90, HIDDEN, generator=torch.Generator().manual_seed(0))
    down, up = low_rank_factors(weight, 5)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(up @ down, (u[:, :5] * s[:5]) @ v[:5], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(up.norm(dim=0), down.norm(dim=1), rtol=1e-3, atol=1e-3)


def test_weighted_factors_fit_the_states_better():
    weight = torch.randn(90, HIDDEN, generator=torch.Generator().manual_seed(0))
    weight = weight * torch.logspace(-2, 0, HIDDEN)
    states = skewed(4000)
    moment = states.T @ states / len(states)
    errors = []
    for matrix in (None, moment):
        down, up = low_rank_factors(weight, 5, matrix)
        errors.append((states @ (weight - up @ down).T).square().mean())
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("weighted", [False, True])
def test_full_rank_recalls_everything(target, runs, weighted):
    drafter = tiny_drafter(target, candidate_rank=HIDDEN, num_candidates=1)
    states = draft_states(drafter, runs)
    assert len(states) == 3 and len(states[0]) > 60
    init_candidate_head(drafter, torch.cat(states) if weighted else None)
    assert candidate_recall(drafter, states) == [1.0] * 3


def test_stage_improves_recall_and_moves_nothing_else(target, runs):
    drafter = tiny_drafter(target, candidate_rank=4, num_candidates=6)
    states = draft_states(drafter, runs)
    init_candidate_head(drafter, torch.cat(states))
    kept = {n: p.clone() for n, p in drafter.named_parameters() if "efficient" not in n}
    before = candidate_recall(drafter, states)
    train_candidate_head(drafter, torch.cat(states), CandidateConfig(steps=150, rows=64, lr=2e-2))
    after = candidate_recall(drafter, states)
    assert sum(after) > sum(before)
    assert all(torch.equal(kept[n], p) for n, p in drafter.named_parameters() if n in kept)


def test_rank_beyond_the_width_is_refused():
    with pytest.raises(ValueError, match="candidate_rank"):
        low_rank_factors(torch.randn(8, 4), 5)
