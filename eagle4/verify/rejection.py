"""Rejection sampling of a drawn tree: the rule is `ops.rejection`, here is what noise it uses."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..noise import Purpose, gumbel, position_key
from ..ops import rejection_rows
from ..ops.rejection import count_refused
from ..sampling import check_law, support


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
    accept_key, token_key = (
        torch.tensor([position_key(key, purpose, position)], device=score_V.device)
        for purpose in (Purpose.ACCEPT, Purpose.TOKEN)
    )
    token_1, refused_1 = rejection_rows(
        score_V[None], accept_key, token_key, child_K[None], token_C[None], logq_C[None]
    )
    if int(token_1) < 0:
        support(score_V)
    return token_1[0], int(refused_1)


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
    accept_key = position_key(key, Purpose.ACCEPT, position)
    drawn = child_K, token_C, logq_C
    refused, p_S = count_refused(token_S, score_S.softmax(dim=0), accept_key, *drawn)
    if refused < len(child_K):
        return child_K[refused], refused
    noise_C = gumbel(position_key(key, Purpose.TOKEN, position), token_S[:-1])
    lead = torch.where(p_S[-1] > 0, outside.best - outside.mass, 0.0)
    best = (p_S.log() + torch.cat([noise_C, lead.view(1)])).argmax()
    return torch.cat([token_S[:-1], outside.token.view(1)])[best], refused
