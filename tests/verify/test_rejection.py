"""Catches: a rejection that differs when all tokens beside the candidates are known only by their
total and their best; rests of no mass, candidates that the target forbids, impossible scores."""

from __future__ import annotations

import pytest
import torch

from eagle4.noise import Purpose, gumbel, position_key
from eagle4.verify import Outside, choose_rejection, choose_rejection_apart

VOCAB = 40


def setting(seed: int, candidates: int, spread: float):
    """Random scores, and drawn children of a random law over some tokens."""
    generator = torch.Generator().manual_seed(seed)
    score_V = spread * torch.randn(VOCAB, generator=generator)
    token_C = torch.randperm(VOCAB, generator=generator)[:candidates]
    # Like the target's, but not equal: all of accept, refuse some and refuse all happen.
    q_C = score_V[token_C] + torch.randn(candidates, generator=generator)
    logq_C = q_C.double().log_softmax(0)
    children = min(3, candidates)
    order = (logq_C + gumbel(position_key(seed, Purpose.DRAFT, 5), token_C)).argsort(
        descending=True
    )
    return score_V, token_C[order[:children]], token_C, logq_C


def outside(score_V: torch.Tensor, token_C: torch.Tensor, key: int, position: int) -> Outside:
    rest_V = score_V.double().index_fill(0, token_C, float("-inf"))
    noise_V = gumbel(position_key(key, Purpose.TOKEN, position), torch.arange(VOCAB))
    best, token = (rest_V + noise_V).max(dim=0)
    return Outside(rest_V.logsumexp(0), best, token)


@pytest.mark.parametrize("candidates", [1, 3, 12, VOCAB])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_candidates_apart_choose_as_whole_rows_do(candidates, spread):
    refusals = set()
    for seed in range(150):
        score_V, child_K, token_C, logq_C = setting(seed, candidates, spread)
        asked = (seed, 5, child_K, token_C, logq_C)
        whole = choose_rejection(score_V, *asked)
        rest = outside(score_V, token_C, seed, 5)
        apart = choose_rejection_apart(score_V[token_C], rest, *asked)
        assert (int(apart[0]), apart[1]) == (int(whole[0]), whole[1])
        refusals.add(whole[1])
    assert len(refusals) > 1, "every case was decided by the first child"


def test_a_forbidden_candidate_is_never_taken():
    for seed in range(20):
        score_V, child_K, token_C, logq_C = setting(seed, 6, 1.0)
        score_V[child_K[0]] = float("-inf")
        rest = outside(score_V, token_C, seed, 5)
        asked = (seed, 5, child_K, token_C, logq_C)
        token, refused = choose_rejection_apart(score_V[token_C], rest, *asked)
        assert refused > 0 and token != child_K[0]
        assert int(token) == int(choose_rejection(score_V, *asked)[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_law_raise(value):
    score_V, child_K, token_C, logq_C = setting(0, 6, 1.0)
    score_V[token_C[0]] = value
    rest = outside(score_V, token_C, 0, 5)
    with pytest.raises(RuntimeError, match="inf"):
        choose_rejection_apart(score_V[token_C], rest, 0, 5, child_K, token_C, logq_C)
