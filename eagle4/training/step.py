"""One optimiser step's work: its runs shared out, scored, and counted.

Runs go to processes and micro-batches in turn. Every row is weighted by the valid slots of the
whole step, so the sum over all parts is the loss of one process with one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..drafter.model import Eagle4Drafter
from .compiled import compiled_depths
from .distributed import Workers
from .features import FeatureStore
from .heads import Columns, loss_heads, teacher_is_kept
from .losses import draft_loss, row_weights
from .routing import auxiliary_loss
from .runs import assemble, with_noise
from .settings import TrainConfig
from .ttt import Runs, unroll


class RunLoss(NamedTuple):
    """What one micro-batch contributes."""

    total: torch.Tensor  # differentiable
    loss_BKM: torch.Tensor
    overlap_BKM: torch.Tensor
    counted_BKM: torch.Tensor  # rows that entered the loss


def micro_batches(
    store: FeatureStore,
    batch: list[tuple[int, int]],
    rank: int,
    world: int,
    config: TrainConfig,
    device: torch.device,
    step: int = 0,
) -> list[Runs]:
    """This process's share of a step's runs, in ``config.accumulation`` parts.

    Every process gets the same number of parts; one that would be empty repeats a run without
    supervision, so that all take part in every exchange. ``step`` seeds the noise on the features.
    """
    parts, seed = [], (config.seed * 1_000_003 + step) * len(batch)
    for i in range(config.accumulation):
        share = slice(i * world + rank, None, world * config.accumulation)
        chosen = batch[share]
        runs = assemble(store, chosen or batch[:1], config.num_anchors, config.num_depths)
        if config.feature_noise:
            seeds = range(seed, seed + len(batch))[share] or [seed]
            runs = with_noise(runs, config.feature_noise, seeds)
        if not chosen:
            runs = runs._replace(valid_BKM=torch.zeros_like(runs.valid_BKM))
        parts.append(Runs(*(tensor.to(device) for tensor in runs)))
    return parts


def count_valid(parts: list[Runs]) -> torch.Tensor:
    """Valid slots by depth, float64 ``[K]``."""
    return torch.stack([runs.valid_BKM.sum((0, 2)).double() for runs in parts]).sum(0)


def run_loss(
    drafter: Eagle4Drafter,
    *,
    runs: Runs,
    columns: Columns | None,
    weight_K: torch.Tensor,
    count_K: torch.Tensor,
    config: TrainConfig,
    overlap: Sequence[float] = (),
) -> RunLoss:
    """Unroll the drafter over a micro-batch and score it.

    ``overlap``: mean overlaps of the step before and of all processes, for lk_lambda: no part of a
    step knows those of all. Empty before the first step, which counts as none.
    With a reduced vocabulary, rows whose teacher prefers a token outside of it are left out
    (``count_K`` still counts them: they are few, and every process knows it).
    """
    depths = compiled_depths(drafter, config.num_depths) if config.compile else None
    flex = config.uses_flex(runs.token_N.device)
    head_BKMH = unroll(drafter, runs, config.recompute, depths, flex)
    valid_BKM = runs.valid_BKM
    kept_BJ = teacher_is_kept(drafter, runs.teacher_BJH)
    if kept_BJ is not None:
        depths, anchors = valid_BKM.shape[1:]
        kept = [kept_BJ[:, k : k + anchors] for k in range(depths)]
        valid_BKM = valid_BKM & torch.stack(kept, dim=1)
    weight_BKM = row_weights(valid_BKM, weight_K, count_K).float()
    heads = loss_heads(drafter, columns)
    overlap_K = torch.tensor(overlap or (0.0,) * config.num_depths, device=head_BKMH.device)
    divergence = (config.loss, config.lk_eta, overlap_K)
    found = draft_loss(head_BKMH, runs.teacher_BJH, heads, weight_BKM, *divergence)
    total = found.total
    if config.balance_loss:
        total = total + config.balance_loss * auxiliary_loss(drafter, count_K)
    return RunLoss(total, found.loss_BKM, found.overlap_BKM, valid_BKM)


class Scored(NamedTuple):
    """Sums over micro-batches, and after `over` over processes."""

    total: torch.Tensor
    loss_K: torch.Tensor
    overlap_K: torch.Tensor
    counted_K: torch.Tensor

    @classmethod
    def zeros(cls, num_depths: int, like: torch.Tensor) -> Scored:
        zero_K = torch.zeros(num_depths, dtype=torch.float64, device=like.device)
        return cls(zero_K.sum(), zero_K, zero_K.clone(), zero_K.clone())

    def plus(self, found: RunLoss, runs: Runs) -> Scored:
        counted = found.counted_BKM
        return Scored(
            self.total + found.total.detach().double(),
            self.loss_K + (found.loss_BKM * counted).sum((0, 2)).double(),
            self.overlap_K + (found.overlap_BKM * counted).sum((0, 2)).double(),
            self.counted_K + counted.sum((0, 2)).double(),
        )

    def over(self, workers: Workers) -> Scored:
        """The sums over all processes, in one exchange."""
        packed = workers.total(torch.cat([self.total[None], *self[1:]]))
        total, rest = packed[0], packed[1:].view(3, -1)
        return Scored(total, *rest)

    def rates(self) -> dict[str, Any]:
        """Mean divergence and acceptance chance of every depth."""
        count_K = self.counted_K.clamp_min(1)
        overlap = (self.overlap_K / count_K).tolist()
        # float32 sums of probabilities may be a hair above 1 (or not finite: the step is skipped)
        assert all(not value > 1.0001 for value in overlap), overlap
        return {"depth_loss": (self.loss_K / count_K).tolist(), "overlap": overlap}
