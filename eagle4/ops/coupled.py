"""Coupled choices: ``argmax(log p + g)`` with the counter-based noise g of a row's key.

The token depends on the scores and the key alone; see `noise` and `verify.coupled`.
"""

from __future__ import annotations

import torch

from ..sampling import draw, support
from .dispatch import wants_triton


def coupled_rows(score_RV: torch.Tensor, key_R: torch.Tensor, impl: str = "auto") -> torch.Tensor:
    """Tokens ``[R]`` (int64) drawn from ``softmax(score_RV)``; ``key_R`` int64 `position_key`.

    Scores that are no law raise `RuntimeError`, as plain sampling does; the kernel, which cannot,
    returns -1 for such a row.
    """
    if wants_triton(impl, score_RV):
        from .triton.coupled import coupled_rows as kernel

        return kernel(score_RV, key_R)
    tokens = []
    for score_V, key in zip(score_RV, key_R.tolist(), strict=True):
        token_S, score_S = support(score_V)
        tokens.append(draw(score_S, token_S, key))
    return torch.stack(tokens) if tokens else torch.zeros_like(key_R)
