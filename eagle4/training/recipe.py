"""The whole recipe: a feature store in, a drafter folder out.

1. Train the drafter (`Trainer`), full head, embedding and head lent by the target.
2. Fit the candidate head to the states that this drafter produces (`candidates`).
3. Write ``folder/drafter`` (serving layout) and ``folder/metrics.json``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from ..config import Eagle4Config
from ..drafter.model import Eagle4Drafter
from ..drafter.pairing import check_pair, tokenizer_fingerprint
from .candidates import (
    candidate_recall,
    draft_states,
    init_candidate_head,
    train_candidate_head,
)
from .features import FeatureStore, target_identity, write_atomically
from .runs import assemble, held_out_runs
from .settings import CandidateConfig, TrainConfig
from .trainer import Trainer


def train_drafter(
    target: Any,
    tokenizer: Any,
    store_folder: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    drafter_config: Eagle4Config | None = None,
    config: TrainConfig | None = None,
    candidates: CandidateConfig | None = None,
    init: Eagle4Drafter | None = None,
) -> tuple[Eagle4Drafter, dict[str, Any]]:
    """Train (or resume) a drafter for a target; returns it with its held-out metrics.

    ``init``: a drafter whose weights are the start (continued training; the optimiser is fresh),
    else random weights of ``drafter_config`` (None: `Eagle4Config.for_target`). Raises `ValueError`
    when the store belongs to another target, tokenizer or choice of tapped layers.
    """
    config, folder = config or TrainConfig(), Path(folder)
    fingerprint = tokenizer_fingerprint(tokenizer) if tokenizer is not None else None
    torch.manual_seed(config.seed)
    if init is None:
        drafter = Eagle4Drafter(drafter_config or Eagle4Config.for_target(target.config))
    else:
        check_pair(init.config, target.config, tokenizer)
        drafter = init.to(torch.float32)
    drafter_config = drafter.config
    drafter_config.tokenizer_fingerprint = fingerprint
    identity = target_identity(target.config, drafter_config.tap_layers, fingerprint)
    store = FeatureStore(store_folder, identity)
    drafter.bind(target.get_input_embeddings(), target.get_output_embeddings())
    if drafter_config.candidate_rank and init is None:
        # saved checkpoints must draft before the second stage, too
        init_candidate_head(drafter)
    trainer = Trainer(drafter, store, folder, config, is_continued=init is not None)
    metrics = trainer.train()
    if drafter_config.candidate_rank:
        metrics["candidate_recall"] = fit_candidate_head(trainer, candidates or CandidateConfig())
    drafter.save_pretrained(folder / "drafter")
    write_atomically(folder / "metrics.json", json.dumps(metrics, indent=1))
    return drafter, metrics


def fit_candidate_head(trainer: Trainer, config: CandidateConfig) -> dict[str, list[float]]:
    """Second stage; returns held-out candidate recall by depth after each part of it."""
    drafter, store, num_anchors = trainer.drafter, trainer.store, trainer.config.num_anchors

    def states(runs):
        return draft_states(
            drafter,
            (
                assemble(store, runs[i : i + 8], num_anchors, config.num_depths)
                for i in range(0, len(runs), 8)
            ),
        )

    # an epoch that training never reaches: other cuts of the same sequences
    batches = trainer.sampler.epoch(10**9)
    train = torch.cat(states([run for batch in batches for run in batch][: config.num_runs]))
    held_out = states(held_out_runs(store, trainer.held_out, num_anchors))
    if config.init != "keep":
        init_candidate_head(drafter, train if config.init == "weighted" else None)
    recall = {config.init: candidate_recall(drafter, held_out)}
    if config.steps:
        train_candidate_head(drafter, train, config, trainer.frequent[: config.num_frequent])
        recall["trained"] = candidate_recall(drafter, held_out)
    return recall
