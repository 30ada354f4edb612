"""The candidate head: a low-rank copy of the LM head that only has to find the likely tokens.

``W ~ E D`` with D ``[r, H]`` and E ``[V, r]``. Start: the best rank-r factors for the draft states
that the head will meet, ``min ||(W - E D) C^{1/2}||_F`` with C the mean of ``h h^T``, from the
H x H matrix ``C^{1/2} W^T W C^{1/2}`` instead of a tall SVD (C = I is the plain truncated SVD).
Tokens may count by their frequency: rows of W are then weighted by its root in the H x H matrix.
Then a short stage with everything else frozen minimises the forward KL from the full head's softmax
to the low-rank one's: the factors only retrieve, so rank is spent on likely tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from ..drafter.model import Eagle4Drafter
from .heads import sample_columns
from .runs import assemble, held_out_runs, supervised_counts
from .settings import CandidateConfig
from .ttt import Runs, unroll

if TYPE_CHECKING:
    from .trainer import Trainer


@torch.no_grad()
def draft_states(drafter: Eagle4Drafter, batches: Iterable[Runs]) -> list[torch.Tensor]:
    """Head inputs ``[R, H]`` of all valid slots, one tensor per depth."""
    parts = [[head[valid] for head, valid in _by_depth(drafter, runs)] for runs in batches]
    return [torch.cat(depth) for depth in zip(*parts, strict=True)]


def _by_depth(drafter: Eagle4Drafter, runs: Runs):
    head_BKMH = unroll(drafter, runs)
    for k in range(head_BKMH.shape[1]):
        yield head_BKMH[:, k], runs.valid_BKM[:, k]


@torch.no_grad()
def low_rank_factors(
    weight_VH: torch.Tensor,
    rank: int,
    moment_HH: torch.Tensor | None = None,
    row_weight_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(D [rank, H], E [V, rank])``, balanced, for the second moment of the states (None: I).

    ``row_weight_V`` (None: ones): the square root of how much every token's error counts.
    """
    hidden = weight_VH.shape[1]
    if not 1 <= rank <= hidden:
        raise ValueError(f"candidate_rank must be from 1 to the hidden size {hidden}, got {rank}")
    weight = weight_VH.double()
    weighted = weight if row_weight_V is None else weight * row_weight_V[:, None]
    gram_HH = weighted.T @ weighted
    root_HH = inverse_HH = torch.eye(hidden, dtype=torch.float64, device=weight.device)
    if moment_HH is not None:
        value_H, basis_HH = torch.linalg.eigh(moment_HH.double())
        # directions that no state has must stay invertible
        value_H = value_H.clamp_min(1e-6 * float(value_H.max())).sqrt()
        root_HH = (basis_HH * value_H) @ basis_HH.T
        inverse_HH = (basis_HH / value_H) @ basis_HH.T
    value_H, basis_HH = torch.linalg.eigh(root_HH @ gram_HH @ root_HH)
    basis_HR = basis_HH[:, -rank:].flip(1)
    scale_R = value_H[-rank:].flip(0).clamp_min(1e-30) ** 0.25
    down_RH = (basis_HR * scale_R).T @ inverse_HH
    up_VR = weight @ (root_HH @ (basis_HR / scale_R))
    return down_RH.float(), up_VR.float()


@torch.no_grad()
def init_candidate_head(
    drafter: Eagle4Drafter,
    states_RH: torch.Tensor | None = None,
    config: CandidateConfig | None = None,
    count_V: torch.Tensor | None = None,
) -> Eagle4Drafter:
    """Set both factors: the plain truncated SVD, or weighted as ``config.init`` says.

    ``"weighted"`` needs draft states, ``"frequency"`` and ``"both"`` also how often every token
    occurs. Without a config, states alone mean ``"weighted"``.
    """
    init = config.init if config is not None else "plain" if states_RH is None else "weighted"
    moment_HH = None
    if init in ("weighted", "both"):
        assert states_RH is not None, f"{init} factors need draft states"
        states = states_RH.double()
        moment_HH = states.T @ states / len(states)
    row_weight_V = None
    if init in ("frequency", "both"):
        assert count_V is not None, f"{init} factors need token counts"
        # one more of each: a token that never occurred may still be the best one
        row_weight_V = (count_V.double() + 1).sqrt().to(drafter.device)
    down_RH, up_VR = low_rank_factors(
        cast(nn.Linear, drafter.head).weight,
        drafter.config.candidate_rank,
        moment_HH,
        row_weight_V,
    )
    drafter.efficient_lm_head_down_proj.weight.copy_(down_RH)
    drafter.efficient_lm_head.weight.copy_(up_VR)
    return drafter


@torch.no_grad()
def candidate_recall(
    drafter: Eagle4Drafter, states: list[torch.Tensor], width: int = 1, chunk: int = 256
) -> list[float]:
    """By depth: share of the full head's best ``width`` tokens that are among the candidates."""
    found = []
    for states_RH in states:
        hits = 0
        for rows in states_RH.split(chunk):
            own = rows.to(cast(nn.Linear, drafter.head).weight.dtype)
            best_RW = drafter.head(own).topk(width, dim=-1).indices
            score_RV = drafter.efficient_lm_head(drafter.efficient_lm_head_down_proj(rows))
            count = min(drafter.config.num_candidates, score_RV.shape[1])
            threshold_R = score_RV.topk(count, dim=-1).values[:, -1:]
            hits += int((score_RV.gather(1, best_RW) >= threshold_R).sum())
        recall = hits / max(1, width * len(states_RH))
        assert 0.0 <= recall <= 1.0, recall
        found.append(recall)
    return found


def train_candidate_head(
    drafter: Eagle4Drafter,
    states_RH: torch.Tensor,
    config: CandidateConfig,
    fixed: torch.Tensor | None = None,
) -> float:
    """Minimise KL(full head || low-rank head) over the two factors; returns the last loss.

    ``fixed``: frequent tokens for the sampled vocabulary (None: the full vocabulary).
    """
    factors = [drafter.efficient_lm_head_down_proj.weight, drafter.efficient_lm_head.weight]
    for factor in factors:
        factor.requires_grad_(True)
    optimizer = torch.optim.Adam(factors, lr=config.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    generator = torch.Generator().manual_seed(config.seed)
    loss = torch.zeros(())
    bar = tqdm(range(config.steps), mininterval=10, desc="candidate head")
    for _ in bar:
        picked = torch.randint(len(states_RH), (config.rows,), generator=generator)
        loss = _candidate_loss(drafter, states_RH[picked], fixed, config.num_sampled, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(kl=f"{float(loss.detach()):.4f}")
    for factor in factors:
        factor.requires_grad_(False)
    return float(loss.detach())


def fit_candidate_head(
    trainer: Trainer, drafter: Eagle4Drafter, config: CandidateConfig
) -> dict[str, list[float]]:
    """The whole second stage; returns held-out recall by depth after each part of it."""
    train, held_out = stage_states(trainer, drafter, config)
    every = torch.cat(train)
    start = dataclasses.replace(config, steps=0)
    fit_factors(trainer, drafter, every, start)
    recall = {config.init: candidate_recall(drafter, held_out)}
    if config.steps:
        fit_factors(trainer, drafter, every, dataclasses.replace(config, init="keep"))
        recall["trained"] = candidate_recall(drafter, held_out)
    return recall


def fit_factors(
    trainer: Trainer, drafter: Eagle4Drafter, states_RH: torch.Tensor, config: CandidateConfig
) -> None:
    """Set both factors as ``config.init`` says, then ``config.steps`` steps on these states."""
    if config.init != "keep":
        init_candidate_head(drafter, states_RH, config, token_counts(trainer))
    if config.steps:
        fixed = trainer.frequent[: config.num_frequent]
        train_candidate_head(drafter, states_RH, config, fixed)


def stage_states(
    trainer: Trainer, drafter: Eagle4Drafter, config: CandidateConfig
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Draft states by depth: of training runs (other cuts than training's), and held out."""
    store, num_anchors = trainer.store, trainer.config.num_anchors
    device = next(drafter.parameters()).device

    def states(runs):
        parts = (
            assemble(store, runs[i : i + 8], num_anchors, config.num_depths)
            for i in range(0, len(runs), 8)
        )
        return draft_states(drafter, (Runs(*(t.to(device) for t in part)) for part in parts))

    # an epoch that training never reaches
    batches = trainer.sampler.epoch(10**9)
    train = states([run for batch in batches for run in batch][: config.num_runs])
    held_out = held_out_runs(store, trainer.held_out, num_anchors)
    return train, states(held_out) if held_out else train


def token_counts(trainer: Trainer) -> torch.Tensor:
    """How often every token is supervised in the training data."""
    return supervised_counts(trainer.store, trainer.sampler.sequences)


def _candidate_loss(drafter, states_RH, fixed, num_sampled, generator) -> torch.Tensor:
    head, bias = drafter.head.weight.detach(), getattr(drafter.head, "bias", None)
    down, up = drafter.efficient_lm_head_down_proj.weight, drafter.efficient_lm_head.weight
    correction = 0.0
    if fixed is not None:
        columns = sample_columns(fixed, num_sampled, head.shape[0], generator)
        head, up, correction = head[columns.index_C], up[columns.index_C], columns.correction_C
        bias = bias if bias is None else bias[columns.index_C]
    head = head.to(states_RH.dtype)
    teacher_RC = (states_RH @ head.T + correction).float()
    if bias is not None:
        teacher_RC = teacher_RC + bias.detach()
    student_RC = (states_RH @ down.T @ up.T + correction).float()
    return F.kl_div(
        student_RC.log_softmax(-1),
        teacher_RC.log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
