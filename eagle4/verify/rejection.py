"""Rejection sampling over siblings that were drawn without replacement from q.

Children are tried in draw order. With p the law that is still owed and q the law that the next
child was drawn from: accept y with probability min(1, p(y)/q(y)); after a rejection
``p <- norm(max(0, p - q))`` and ``q <- q without y, renormalised``; if all are rejected the token
is drawn from what is left of p. One child is the rule of Leviathan et al. (2023) and Chen et al.
(2023); without replacement: Jeon et al. (2024), Yang et al. (2024).

Exact as long as nothing that is decided about a child depends on what was drawn for it: which
children exist is fixed before they are drawn, see `tree.template`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..noise import Purpose, gumbel, position_key, uniform
from ..sampling import check_law, draw, support


class Trial(NamedTuple):
    """One child put to the test."""

    accept: torch.Tensor  # 0-d probability of acceptance, given that its elder siblings failed
    residual_S: torch.Tensor  # the law that is owed if it is rejected


def trials(
    token_S: torch.Tensor,
    p_S: torch.Tensor,
    child_K: torch.Tensor,
    token_C: torch.Tensor,
    logq_C: torch.Tensor,
) -> Iterator[Trial]:
    """The trials of ``child_K`` in draw order.

    ``p_S`` is a law over the ascending tokens ``token_S``, ``logq_C`` the law over the distinct
    candidates ``token_C`` that the children were drawn from without replacement.
    """
    place_C = torch.searchsorted(token_S, token_C).clamp_max(len(token_S) - 1)
    is_known_C = token_S[place_C] == token_C
    for child in child_K:
        q_C = logq_C.log_softmax(dim=0).exp()
        q_S = torch.zeros_like(p_S).index_add(0, place_C, torch.where(is_known_C, q_C, 0.0))
        is_child_C, is_child_S = token_C == child, token_S == child
        q = torch.where(is_child_C, q_C, 0.0).sum()
        p = torch.where(is_child_S, p_S, 0.0).sum()
        p_S = _normalised((p_S - q_S).clamp_min(0.0), torch.where(is_child_S, 0.0, p_S))
        yield Trial((p / q).clamp_max(1.0), p_S)
        logq_C = torch.where(is_child_C, float("-inf"), logq_C)


def _normalised(residual_S: torch.Tensor, otherwise_S: torch.Tensor) -> torch.Tensor:
    """The residual as a law. It vanishes by rounding only, where p and q are the same law."""
    total = residual_S.sum()
    if total > 0:
        return residual_S / total
    return otherwise_S / otherwise_S.sum()


def choose_rejection(
    score_V: torch.Tensor,
    key: int,
    position: int,
    child_K: torch.Tensor,
    token_C: torch.Tensor,
    logq_C: torch.Tensor,
) -> tuple[torch.Tensor, int]:
    """The token at ``position`` of the sequence with stream key ``key``, and how many were refused.

    The acceptance test, the drafter's draws and the final draw use noise of different purposes.
    Raises `RuntimeError` for scores that are no law, as plain sampling does.
    """
    token_S, score_S = support(score_V)
    place = key, position
    refused, p_S = _test(token_S, score_S.softmax(dim=0), *place, child_K, token_C, logq_C)
    if refused < len(child_K):
        return child_K[refused], refused
    token = draw(p_S.log(), token_S, position_key(key, Purpose.TOKEN, position))
    return token, refused


class Outside(NamedTuple):
    """All tokens that are no candidates, as one: what is left of a row that ranks share."""

    mass: torch.Tensor  # logsumexp of their scores
    best: torch.Tensor  # the largest of their scores plus the noise of the final draw
    token: torch.Tensor  # whose that is


def choose_rejection_apart(
    score_C: torch.Tensor,
    outside: Outside,
    key: int,
    position: int,
    child_K: torch.Tensor,
    token_C: torch.Tensor,
    logq_C: torch.Tensor,
) -> tuple[torch.Tensor, int]:
    """As `choose_rejection`, from the candidates' scores and what all others have in common.

    Exact, because a rejection takes nothing from tokens that q does not reach: it only scales them.
    """
    order_C = token_C.argsort()
    # Behind all tokens: `trials` wants them ascending.
    beyond = token_C.new_full((1,), torch.iinfo(torch.int64).max)
    token_S = torch.cat([token_C[order_C], beyond])
    score_S = torch.cat([score_C[order_C].double(), outside.mass.view(1)])
    check_law(score_S.max())
    place = key, position
    refused, p_S = _test(token_S, score_S.softmax(dim=0), *place, child_K, token_C, logq_C)
    if refused < len(child_K):
        return child_K[refused], refused
    noise_C = gumbel(position_key(key, Purpose.TOKEN, position), token_S[:-1])
    lead = torch.where(p_S[-1] > 0, outside.best - outside.mass, 0.0)
    best = (p_S.log() + torch.cat([noise_C, lead.view(1)])).argmax()
    return torch.cat([token_S[:-1], outside.token.view(1)])[best], refused


def _test(
    token_S: torch.Tensor,
    p_S: torch.Tensor,
    key: int,
    position: int,
    child_K: torch.Tensor,
    token_C: torch.Tensor,
    logq_C: torch.Tensor,
) -> tuple[int, torch.Tensor]:
    """How many children were refused, and the law that is owed after them."""
    rank_K = torch.arange(len(child_K), device=child_K.device)
    uniform_K = uniform(position_key(key, Purpose.ACCEPT, position), rank_K)
    for rank, trial in enumerate(trials(token_S, p_S, child_K, token_C, logq_C)):
        if uniform_K[rank] < trial.accept:
            return rank, p_S
        p_S = trial.residual_S
    return len(child_K), p_S
