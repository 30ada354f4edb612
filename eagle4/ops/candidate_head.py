"""The efficient LM head: candidates by low-rank scores, exact logits for those only.

EAGLE-4 article: ``s = E z`` with ``z = D h`` of rank r over the whole vocabulary, the best C tokens
by ``s``, their exact logits under the full head, softmax over the C. The kernels never write a row
as long as the vocabulary: they keep the largest score of every few neighbours, choose the best C
neighbourhoods (which contain the best C tokens, see `block_topk`) and score those again.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from .block_topk import block_topk
from .dispatch import is_stock, wants_triton


def best_candidates(
    low_RD: torch.Tensor, up: nn.Linear, num_candidates: int, impl: str = "auto"
) -> torch.Tensor:
    """Tokens ``[R, C]`` (int64, distinct, unordered) with the largest scores ``up(low_RD)``.

    C is ``num_candidates`` or the whole vocabulary. Among equal scores the choice is arbitrary.
    ``up`` (no bias) is called as a module, so packed CPU weights serve it.
    """
    count = min(num_candidates, up.weight.shape[0])

    def fits() -> bool:
        return is_stock(up) and up.bias is None

    if wants_triton(impl, low_RD, up.weight, fits=fits):
        from .triton.candidate_head import best_candidates as kernel

        return kernel(low_RD, up.weight, count)
    return block_topk(up(low_RD), count)


def exact_logits(
    lm_head: nn.Module, hidden_RH: torch.Tensor, token_RC: torch.Tensor, impl: str = "auto"
) -> torch.Tensor:
    """Logits ``[R, C]`` (float32) of the full head for the given tokens of every row."""
    weight_VH = cast(torch.Tensor, lm_head.weight)
    bias_V = cast("torch.Tensor | None", getattr(lm_head, "bias", None))
    if wants_triton(impl, hidden_RH, weight_VH):
        from .triton.candidate_head import exact_logits as kernel

        return kernel(weight_VH, bias_V, hidden_RH, token_RC)
    logit_RC = torch.matmul(weight_VH[token_RC], hidden_RH.unsqueeze(-1)).squeeze(-1)
    if bias_V is not None:
        logit_RC = logit_RC + bias_V[token_RC]
    return logit_RC.float()


def candidate_logprobs(
    lm_head: nn.Module, hidden_RH: torch.Tensor, token_RC: torch.Tensor, impl: str = "auto"
) -> torch.Tensor:
    """Log-softmax ``[R, C]`` (float32) of the full head's logits over the given tokens."""
    return exact_logits(lm_head, hidden_RH, token_RC, impl).log_softmax(dim=-1)
