"""The whole recipe: a feature store in, a drafter folder out.

1. Start: random weights, or an earlier drafter as it is or mapped to a new form (`warm_start`).
2. Train it (`Trainer`), full head; go back to the checkpoint that its `judge` kept.
3. Fit the candidate head to the states that this drafter produces (`candidates`).
4. Write ``folder/drafter`` (serving layout, with a model card), ``folder/metrics.json`` and curves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..config import Eagle4Config
from ..drafter.model import Eagle4Drafter
from ..drafter.pairing import check_pair, tokenizer_fingerprint
from .candidates import fit_candidate_head, init_candidate_head
from .card import write_card
from .curves import draw_curves
from .features import FeatureStore, check_identity, target_identity, write_atomically
from .jsonl import read_rows
from .judge import EngineDecode, held_out_prompts, whole_drafter
from .runs import assemble
from .settings import CandidateConfig, TrainConfig
from .trainer import Trainer
from .ttt import Runs
from .warm_start import warm_start

WARM_START_RUNS = 64


def train_drafter(
    target: Any,
    tokenizer: Any,
    features: str | os.PathLike | FeatureStore,
    folder: str | os.PathLike,
    *,
    drafter_config: Eagle4Config | None = None,
    config: TrainConfig | None = None,
    candidates: CandidateConfig | None = None,
    init: Eagle4Drafter | None = None,
) -> tuple[Eagle4Drafter, dict[str, Any]]:
    """Train (or resume) a drafter for a target; returns it with its held-out metrics.

    ``features``: a folder that a `FeatureWriter` filled, or a store such as `OnlineFeatures`.
    ``drafter_config`` None: the form of ``init``, else `Eagle4Config.for_target`. ``init``: a
    drafter whose weights are the start, mapped to ``drafter_config`` where that differs; the
    optimiser is fresh. Raises `ValueError` when the store belongs to another target, tokenizer or
    choice of tapped layers, and when the start cannot be mapped.
    """
    config, folder = config or TrainConfig(), Path(folder)
    fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    if drafter_config is None:
        drafter_config = init.config if init else Eagle4Config.for_target(target.config)
    drafter_config.tokenizer_fingerprint = fingerprint
    check_pair(drafter_config, target.config, tokenizer)
    identity = target_identity(target.config, drafter_config.tap_layers, fingerprint)
    store = features if isinstance(features, FeatureStore) else FeatureStore(features)
    check_identity(store.manifest["target"], identity, str(store.folder))
    drafter = start_drafter(target, drafter_config, store, config, init)
    trainer = make_trainer(target, drafter, store, folder, config, init is not None)
    metrics = trainer.train()
    drafter, metrics = _best(trainer, metrics)
    if trainer.workers.is_main:
        if drafter_config.candidate_rank:
            stage = candidates or CandidateConfig()
            metrics["candidate_recall"] = fit_candidate_head(trainer, drafter, stage)
        drafter.save_pretrained(folder / "drafter")
        write_atomically(folder / "metrics.json", json.dumps(metrics, indent=1))
        write_card(folder / "drafter", target, drafter, store, config, metrics)
        draw_curves(folder)
    trainer.workers.wait()
    return drafter, metrics


def start_drafter(
    target: Any,
    drafter_config: Eagle4Config,
    store: FeatureStore,
    config: TrainConfig,
    init: Eagle4Drafter | None,
) -> Eagle4Drafter:
    """A float32 drafter on the target's device, bound to it: random, or from ``init``."""
    config.uses_flex(target.device)  # fails here where it is impossible
    lent = target.get_input_embeddings(), target.get_output_embeddings()
    torch.manual_seed(config.seed)
    drafter = Eagle4Drafter(drafter_config)
    drafter.to(target.device).bind(*lent)  # pyright: ignore
    if init is not None:
        source: Any = init.to(device=target.device, dtype=torch.float32)  # pyright: ignore
        source.bind(*lent)
        warm_start(drafter, source, _start_batches(store, config, target.device))
    if drafter_config.candidate_rank not in (0, init.config.candidate_rank if init else 0):
        # saved checkpoints must draft before the second stage, too
        init_candidate_head(drafter)
    return drafter


def make_trainer(
    target: Any,
    drafter: Eagle4Drafter,
    store: FeatureStore,
    folder: Path,
    config: TrainConfig,
    is_continued: bool,
) -> Trainer:
    """A trainer that decodes held-out prompts in the engine, if the settings ask for that."""
    trainer = Trainer(drafter, store, folder, config, is_continued)
    prompts = held_out_prompts(store, trainer.held_out, config.decode_prompts)
    if prompts and config.decode_prompts:
        trainer.judge.decode = EngineDecode(
            target, prompts, config.decode_tokens, config.eval_depths
        )
    return trainer


def _start_batches(store: FeatureStore, config: TrainConfig, device: Any) -> Iterator[Runs]:
    for index in range(min(len(store), WARM_START_RUNS)):
        runs = assemble(store, [(index, len(store.field(index, "ids")) - 2)], 1, 1)
        yield Runs(*(tensor.to(device) for tensor in runs))


def _best(trainer: Trainer, last: dict[str, Any]) -> tuple[Eagle4Drafter, dict[str, Any]]:
    """The drafter of the checkpoint that was kept, with its metrics."""
    drafter, step = whole_drafter(trainer.drafter), trainer.state.kept
    best = trainer.folder / "best"
    if step != trainer.state.step and best.is_dir():
        kept = Eagle4Drafter.from_pretrained(best, dtype=torch.float32)
        kept.to(next(trainer.drafter.parameters()).device)  # pyright: ignore
        drafter = kept.bind(drafter.embedding, drafter.target_head)
        records = read_rows(trainer.folder / "log.jsonl")
        by_step = {r["step"]: r["held_out"] for r in records if "held_out" in r}
        longest = max(by_step.values(), key=lambda m: m.get("tau_measured", m["tau_chain"]))
        last = by_step.get(step, longest)
    steps = {"steps": trainer.state.step, "train_seconds": round(trainer.seconds)}
    return drafter, {**last, **steps, "held_out_sequences": len(trainer.held_out)}
