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

from ..noise import uniform
from ..sampling import draw, support
from .dispatch import wants_triton


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


def rejection_rows(
    score_RV: torch.Tensor,
    accept_key_R: torch.Tensor,
    token_key_R: torch.Tensor,
    child_RK: torch.Tensor,
    token_RC: torch.Tensor,
    logq_RC: torch.Tensor,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token behind every row and how many of its children were refused, int64 ``[R]`` each.

    ``score_RV`` p as scores; ``child_RK`` drawn children in draw order, -1 behind the last;
    ``token_RC``, ``logq_RC`` (float64) the candidates that they were drawn from. The keys
    (`position_key`) of the acceptance test and of the final draw differ in purpose.

    Scores that are no law raise `RuntimeError`, as plain sampling does; the kernel, which cannot,
    returns -1 for such a row.
    """
    if wants_triton(impl, score_RV):
        from .triton.rejection import rejection_rows as kernel

        return kernel(score_RV, accept_key_R, token_key_R, child_RK, token_RC, logq_RC)
    found = [
        _choose(*row)
        for row in zip(
            score_RV,
            *(accept_key_R.tolist(), token_key_R.tolist()),
            *(child_RK, token_RC, logq_RC),
            strict=True,
        )
    ]
    if not found:
        return torch.zeros_like(accept_key_R), torch.zeros_like(accept_key_R)
    tokens, refused = zip(*found, strict=True)
    return torch.stack(tokens), torch.tensor(refused, device=score_RV.device)


def _choose(
    score_V: torch.Tensor,
    accept_key: int,
    token_key: int,
    child_K: torch.Tensor,
    token_C: torch.Tensor,
    logq_C: torch.Tensor,
) -> tuple[torch.Tensor, int]:
    child_K = child_K[child_K >= 0]
    token_S, score_S = support(score_V)
    p_S = score_S.softmax(dim=0)
    refused, p_S = count_refused(token_S, p_S, accept_key, child_K, token_C, logq_C)
    if refused < len(child_K):
        return child_K[refused], refused
    return draw(p_S.log(), token_S, token_key), refused


def count_refused(
    token_S: torch.Tensor,
    p_S: torch.Tensor,
    accept_key: int,
    child_K: torch.Tensor,
    token_C: torch.Tensor,
    logq_C: torch.Tensor,
) -> tuple[int, torch.Tensor]:
    """How many children were refused, and the law that is owed after them; see `trials`."""
    uniform_K = uniform(accept_key, torch.arange(len(child_K), device=child_K.device))
    for rank, trial in enumerate(trials(token_S, p_S, child_K, token_C, logq_C)):
        if uniform_K[rank] < trial.accept:
            return rank, p_S
        p_S = trial.residual_S
    return len(child_K), p_S
