"""Rejection sampling of a drawn tree: the rule is `ops.rejection`, here is what noise it uses."""

from __future__ import annotations

import torch

from ..noise import Purpose, position_key
from ..ops import rejection_rows
from ..sampling import support


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
