"""One rank's share of a drafter: heads of the attention, columns of the MLP, rows of the heads.

`fc`, `eh_proj`, norms and embedding stay whole. A proposal costs one packed all-gather: every rank
sends its best candidates with their low-rank scores and their exact logits, which it owns, and
ranks them all.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from ..ops import block_topk
from ..ops.candidate_head import exact_logits
from ..parallel import Ranks, VocabShard
from ..parallel.linear import share_of, share_of_heads, split_inputs, split_outputs
from ..parallel.plan import fits_heads
from ..types import Candidates
from .block import DraftAttention, DraftBlock
from .model import Eagle4Drafter

logger = logging.getLogger("eagle4")


class SharedHeads(NamedTuple):
    """How a split drafter proposes: which tokens this rank scores, and with whom it shares."""

    ranks: Ranks
    vocab: VocabShard  # of the full head, and of the low-rank one

    def propose_candidates(
        self,
        lm_head: nn.Module,
        down: nn.Linear,
        up: nn.Linear,
        hidden_RH: torch.Tensor,
        num_candidates: int,
        top_k: int,
    ) -> Candidates:
        """As `head.propose_candidates`, over all ranks."""
        score_RV = up(down(hidden_RH)).float()
        index_RC = block_topk(score_RV, min(num_candidates, score_RV.shape[-1]))
        exact_RC = exact_logits(lm_head, hidden_RH, index_RC)
        best_RC = score_RV.gather(-1, index_RC)
        width = min(num_candidates, self.vocab.step)
        token_RC, best_RC, exact_RC = self._gather(index_RC, (best_RC, exact_RC), width)
        place_RC = best_RC.topk(min(num_candidates, self.vocab.size), dim=-1).indices
        token_RC = token_RC.gather(-1, place_RC)
        logp_RC = F.log_softmax(exact_RC.gather(-1, place_RC), dim=-1)
        return self._best(token_RC, logp_RC, top_k)

    def propose_full(self, lm_head: nn.Module, hidden_RH: torch.Tensor, top_k: int) -> Candidates:
        """As `head.propose_full`, over all ranks."""
        with self.vocab.local():
            logit_RV = lm_head(hidden_RH).float()
        mass_R1 = logit_RV.logsumexp(dim=-1, keepdim=True)
        logit_RK, index_RK = logit_RV.topk(min(top_k, logit_RV.shape[-1]), dim=-1)
        width = min(top_k, self.vocab.step)
        found = self._gather(index_RK, (logit_RK, mass_R1.expand_as(logit_RK)), width)
        token_RK, logit_RK, mass_RK = found
        mass_RW = mass_RK.unflatten(-1, (self.ranks.size, width))[..., 0]
        logp_RK = logit_RK - mass_RW.logsumexp(dim=-1, keepdim=True)
        return self._best(token_RK, logp_RK, top_k)

    def _gather(
        self, index_RC: torch.Tensor, values: tuple[torch.Tensor, ...], width: int
    ) -> list[torch.Tensor]:
        """Tokens and values ``[R, ranks * width]`` of all ranks; padding is -inf."""
        pad = (0, width - index_RC.shape[-1])
        # Ids below 2^24 are exact in float32.
        parts = [F.pad(index_RC + self.vocab.first, pad).float()]
        parts += [F.pad(value, pad, value=float("-inf")) for value in values]
        found = self.ranks.all_gather(torch.stack(parts), "draft")
        token_RC, *rest = found.movedim(0, -2).flatten(-2)
        return [token_RC.long(), *rest]

    def _best(self, token_RC: torch.Tensor, logp_RC: torch.Tensor, top_k: int) -> Candidates:
        """The best of the shared candidates, as rank 0 sees them: whole trees hang from this."""
        logp_RK, place_RK = logp_RC.topk(min(top_k, logp_RC.shape[-1]), dim=-1)
        token_RK = token_RC.gather(-1, place_RK)
        packed = torch.stack([token_RK.int(), logp_RK.float().view(torch.int32)])
        token_RK, bits_RK = self.ranks.broadcast(packed, "draft")
        return Candidates(token_RK.long(), bits_RK.view(torch.float32))


def shard_drafter(drafter: Eagle4Drafter, target_vocab: VocabShard) -> None:
    """Split a bound drafter in place; the LM head that it borrows is split already.

    An attention or MLP whose size does not divide stays whole: a drafter is small, and its target
    may well divide.
    """
    config, ranks = drafter.config, target_vocab.ranks
    block = cast(DraftBlock, drafter.layers[0])
    heads, kv_heads, whole = config.num_attention_heads, config.num_key_value_heads, []
    if fits_heads(heads, kv_heads, ranks.size):
        _split_attention(block.self_attn, heads, kv_heads, ranks)
    else:
        whole.append("attention")
    if config.intermediate_size % ranks.size == 0:
        share = share_of(config.intermediate_size, ranks)
        for into in (block.mlp.gate_proj, block.mlp.up_proj):
            split_outputs(into, share)
        split_inputs(block.mlp, "down_proj", share, ranks, slices=False)
    else:
        whole.append("MLP")
    if whole and ranks.is_first:
        logger.info("the drafter's %s does not divide by %d ranks", " and ".join(whole), ranks.size)
    vocab = target_vocab
    if config.own_lm_head:
        vocab = VocabShard(ranks, drafter.lm_head.out_features)
        vocab.split_head(drafter.lm_head)
    if config.candidate_rank:
        vocab.split_head(drafter.efficient_lm_head)
    drafter.shared = SharedHeads(ranks, vocab)


def _split_attention(
    attention: DraftAttention, num_heads: int, num_kv_heads: int, ranks: Ranks
) -> None:
    share = share_of_heads(num_heads, attention.head_dim, ranks)
    split_outputs(attention.q_proj, share)
    for projection in (attention.k_proj, attention.v_proj):
        split_outputs(projection, share_of_heads(num_kv_heads, attention.head_dim, ranks))
    split_inputs(attention, "o_proj", share, ranks, slices=False)
