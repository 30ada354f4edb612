"""Held-out metrics: what a drafter would be worth, from teacher-forced unrolling.

Per depth k, over slots supervised at every depth <= k (``valid_k``):
  ``top1``  the student's best token is the target's best;
  ``top4``  the target's best token is among the student's best four.
``tau_chain = 1 + sum_k hits_k / valid_k`` where hits_k counts slots right at every depth <= k: the
accept length of a chain, bonus included (NeMo's ``tau_sim``). ``tau_top4`` is the same with top4:
an upper bound for a tree of width 4. Tokens are the text's own; for sampled text a later depth
follows the text, not the target's best token.

``tau_chain`` starts a chain at every slot. Serving starts one behind every rejection, at tokens
that are harder than the average, and so accepts less. ``tau_walk`` counts what serving would do on
the same text: from a slot, on by the accepted tokens and the bonus, until the run ends.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ..drafter.model import Eagle4Drafter
from .heads import kept_tokens
from .ttt import Runs, unroll


class Tally:
    """Counts over batches; `result` turns them into rates."""

    def __init__(self, num_depths: int, width: int = 4):
        self.width = width
        self.rounds = self.walked = 0
        zeros = torch.zeros(num_depths, dtype=torch.float64)
        self.valid_K, self.loss_K, self.top1_K, self.chain_K, self.wide_K, self.path_K = (
            zeros.clone() for _ in range(6)
        )

    def add(
        self,
        head_KMH: torch.Tensor,
        teacher_JH: torch.Tensor,
        valid_KM: torch.Tensor,
        lm_head: torch.nn.Module,
        teacher_head: torch.nn.Module | None = None,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Score one run with the student's whole head ``lm_head``.

        ``teacher_head``: the target's where the student has its own; ``kept``: target ids of a
        reduced vocabulary. A best token outside of it is a miss; the KL is to the teacher
        renormalised on what is kept.
        """
        logp_JV = _logits(teacher_head or lm_head, teacher_JH).log_softmax(-1)
        best_J = logp_JV.argmax(-1)
        if kept is not None:
            logp_JV = logp_JV[:, kept].log_softmax(-1)
        p_JV, num_anchors = logp_JV.exp(), valid_KM.shape[1]
        chain = path = torch.ones(num_anchors, dtype=torch.bool, device=valid_KM.device)
        accepted_M = torch.zeros(num_anchors, dtype=torch.int64, device=valid_KM.device)
        for k, valid in enumerate(valid_KM):
            rows = slice(k, k + num_anchors)
            logq_MV = _logits(lm_head, head_KMH[k]).log_softmax(-1)
            kl = (p_JV[rows] * (logp_JV[rows] - logq_MV)).sum(-1)
            top_MW = logq_MV.topk(min(self.width, logq_MV.shape[-1]), dim=-1).indices
            right = (top_MW if kept is None else kept[top_MW]) == best_J[rows, None]
            chain, path = chain & right[:, 0], path & right.any(-1)
            accepted_M += chain
            for total, value in (
                (self.valid_K, valid),
                (self.loss_K, kl * valid),
                (self.top1_K, right[:, 0] & valid),
                (self.wide_K, right.any(-1) & valid),
                (self.chain_K, chain & valid),
                (self.path_K, path & valid),
            ):
                total[k] += float(value.sum().detach())
        self._walk(accepted_M.tolist(), valid_KM.all(0).tolist())

    def _walk(self, accepted: list[int], is_whole: list[bool]) -> None:
        """Rounds over a run's slots, while every depth is supervised."""
        slot = 0
        while slot < len(accepted) and is_whole[slot]:
            self.rounds += 1
            self.walked += accepted[slot] + 1
            slot += accepted[slot] + 1

    def result(self) -> dict[str, Any]:
        """Rates in [0, 1] by depth, KL in nats, and the two accept lengths."""
        count_K = self.valid_K.clamp_min(1)
        rates = {
            name: (total / count_K).tolist()
            for name, total in (
                ("top1", self.top1_K),
                ("chain", self.chain_K),
                (f"top{self.width}", self.wide_K),
                (f"path{self.width}", self.path_K),
            )
        }
        for name, values in rates.items():
            assert all(0.0 <= value <= 1.0 for value in values), (name, values)
        return {
            "kl": (self.loss_K / count_K).tolist(),
            **rates,
            "tau_chain": 1 + sum(rates["chain"]),
            "tau_walk": self.walked / self.rounds if self.rounds else 1.0,
            f"tau_top{self.width}": 1 + sum(rates[f"path{self.width}"]),
        }


@torch.no_grad()
def evaluate(drafter: Eagle4Drafter, batches: list[Runs]) -> dict[str, Any]:
    """Metrics over batches of runs; depths are those of the batches."""
    tally, kept = Tally(batches[0].token_BKM.shape[1]), kept_tokens(drafter)
    for runs in batches:
        head_BKMH = unroll(drafter, runs)
        for b in range(len(head_BKMH)):
            tally.add(
                *(head_BKMH[b], runs.teacher_BJH[b], runs.valid_BKM[b]),
                *(drafter.head, drafter.target_head, kept),
            )
    return tally.result()


def _logits(head: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return head(rows.to(cast(torch.Tensor, head.weight).dtype)).float()
