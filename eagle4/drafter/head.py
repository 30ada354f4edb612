"""From a draft state to tokens: the full LM head and the efficient (candidate) head.

Efficient head, EAGLE-4 article: ``z = D h`` (rank r), ``s = E z`` over the whole vocabulary, the
best ``num_candidates`` tokens by ``s``, exact logits of the full head for those rows only, softmax
over the candidates.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..ops import best_candidates, candidate_logprobs
from ..types import Candidates


class BorrowedHead:
    """Embedding and LM head modules of the target, held without registering them as ours."""

    def __init__(self, embed_tokens: nn.Module, lm_head: nn.Module):
        self.embed_tokens = embed_tokens
        self.lm_head = lm_head


def propose_full(lm_head: nn.Module, hidden_RH: torch.Tensor, top_k: int) -> Candidates:
    """Best ``top_k`` tokens under the softmax of the full head."""
    logp_RV = F.log_softmax(lm_head(hidden_RH).float(), dim=-1)
    logp_RK, token_RK = logp_RV.topk(min(top_k, logp_RV.shape[-1]), dim=-1)
    return Candidates(token_RK, logp_RK)


def propose_candidates(
    lm_head: nn.Module,
    down: nn.Linear,
    up: nn.Linear,
    hidden_RH: torch.Tensor,
    num_candidates: int,
    top_k: int,
) -> Candidates:
    """Best ``top_k`` tokens under the softmax over the low-rank head's candidates."""
    token_RC = best_candidates(down(hidden_RH), up, num_candidates)
    logp_RC = candidate_logprobs(lm_head, hidden_RH, token_RC)
    logp_RK, index_RK = logp_RC.topk(min(top_k, logp_RC.shape[-1]), dim=-1)
    return Candidates(token_RC.gather(-1, index_RK), logp_RK)
