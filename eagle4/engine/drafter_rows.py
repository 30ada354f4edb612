"""One forward of the drafter on the draft pool, and the candidates behind its rows."""

from __future__ import annotations

import torch

from ..cache import AttentionStep
from ..drafter import DraftOutput, Eagle4Drafter
from ..types import Candidates
from .level import MAX_CANDIDATES
from .state import Sequence, State
from .stats import SpeculationStats


class DraftError(RuntimeError):
    """The drafter produced something unusable; decoding goes on without it."""


def forward(
    state: State,
    drafter: Eagle4Drafter,
    hidden_RH: torch.Tensor,
    token_R: torch.Tensor,
    step: AttentionStep,
    stats: SpeculationStats,
) -> DraftOutput:
    """One drafter step on the draft pool."""
    heads, heads_kv = drafter.num_heads
    asked = heads // heads_kv, drafter.config.sliding_window
    layer = step.layer(*draft_pools(state, drafter), *asked)
    if state.graphs.compiled:  # a view would bring the sizes of its base along
        hidden_RH, token_R = hidden_RH.clone(), token_R.clone()
    out = state.graphs.draft(drafter, hidden_RH, token_R, step.position_R, layer)
    stats.draft_calls += 1
    return out


def draft_pools(state: State, drafter: Eagle4Drafter) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the drafter's layer."""
    shape = 0, drafter.num_heads[1], drafter.config.head_dim
    like_RHD = torch.empty(shape, dtype=drafter.dtype, device=state.device)
    return state.draft_pool.pair(0, like_RHD, like_RHD)


def propose(
    state: State,
    sequences: list[Sequence],
    drafter: Eagle4Drafter,
    head_RH: torch.Tensor,
    depth: int,
    top_k: int,
) -> Candidates:
    """The likeliest children, ``depth`` behind the roots; sampling looks at the shared noise."""
    if state.sampler is None:
        return state.graphs.propose(drafter, head_RH, top_k)
    candidates = state.graphs.propose(drafter, head_RH, min(drafter.num_proposable, MAX_CANDIDATES))
    return state.sampler.rank(candidates, sequences, depth, top_k)


def check_finite(candidates: Candidates) -> Candidates:
    """The same candidates. Raises `DraftError`; the host waits for them."""
    if not torch.isfinite(candidates.logp_RK[:, 0]).all():
        raise DraftError("the drafter's probabilities are not finite")
    return candidates
