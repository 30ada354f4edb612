"""Expert load of a MoE drafter over an optimiser step: measured, balanced, logged.

The router runs once per depth and micro-batch, so its choices are summed over all of them and over
all processes before the bias moves. ``expert_load`` is the article's Figure 3: the largest load
over the mean; 1 is perfect balance.
"""

from __future__ import annotations

from typing import Any

import torch

from ..drafter.model import Eagle4Drafter
from ..drafter.moe import Router
from .distributed import Workers


class Routing:
    """The routers of a drafter; none for a dense one."""

    def __init__(self, drafter: Eagle4Drafter, rate: float):
        self.routers = routers(drafter)
        self.rate = rate

    def after_step(self, workers: Workers) -> dict[str, Any]:
        """Balance by the step's load; returns what to log."""
        worst = 0.0
        for router in self.routers:
            load_E = workers.total(router.take_load())
            router.balance(load_E, self.rate)
            worst = max(worst, float(load_E.max() / load_E.mean().clamp_min(1e-9)))
        return {"expert_load": worst} if self.routers else {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold beside parameters."""
        return {
            f"{i}.bias": router.e_score_correction_bias for i, router in enumerate(self.routers)
        }


def routers(drafter: Eagle4Drafter) -> list[Router]:
    """All routers of a drafter."""
    return [module for module in drafter.modules() if isinstance(module, Router)]


def auxiliary_loss(drafter: Eagle4Drafter, count_K: torch.Tensor) -> torch.Tensor:
    """``E sum_e f_e P_e`` over the micro-batch: f the share of choices, P the mean probability.

    Its least value is 1, at perfect balance. Zero for a dense drafter. Source: Switch Transformer.
    """
    total = torch.zeros((), device=count_K.device)
    for router in routers(drafter):
        probability_E = torch.stack(router.balance_terms).mean(0)
        load_E = torch.stack(router.loads).sum(0)
        total = total + len(load_E) * (load_E / load_E.sum() * probability_E).sum()
    return total
