"""Coupled sampling: the target's token is ``argmax(log p + g)`` with noise that the drafter shares.

Which noise belongs to a token depends on the sequence's key and the token's position alone, so the
choice is what plain sampling with the same seed makes, whatever was drafted. The drafter ranks by
``log q + g`` with the same g and therefore tends to propose it.
"""

from __future__ import annotations

import torch

from ..noise import Purpose, position_key
from ..ops import coupled_rows
from ..sampling import support


def choose_coupled(score_V: torch.Tensor, key: int, position: int) -> torch.Tensor:
    """The token at ``position`` of the sequence whose stream key is ``key``.

    Raises `RuntimeError` for scores that are no law, as plain sampling does.
    """
    key_1 = torch.tensor([position_key(key, Purpose.TOKEN, position)], device=score_V.device)
    token_1 = coupled_rows(score_V[None], key_1)
    if int(token_1) < 0:
        support(score_V)
    return token_1[0]
