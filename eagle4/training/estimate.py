"""What a run would need, before it is made: counts, memory, and time from two measured steps."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from ..config import Eagle4Config
from ..drafter.model import Eagle4Drafter
from .features import FeatureStore
from .runs import Position
from .settings import TrainConfig
from .trainer import Trainer


def estimate(
    target: Any, drafter_config: Eagle4Config, store: FeatureStore, config: TrainConfig
) -> dict[str, int | float]:
    """Parameters, data, bytes of the training state, seconds per step and for all steps.

    Two real steps are made in a temporary folder and forgotten; the second one is timed. Memory of
    activations is a rough count: 14 rows of hidden and inner width per anchor and depth.
    """
    lent = target.get_input_embeddings(), target.get_output_embeddings()
    drafter = Eagle4Drafter(drafter_config)
    drafter.to(target.device).bind(*lent)  # pyright: ignore
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(drafter, store, Path(folder), config)
        trainer.step()
        began = time.perf_counter()
        trainer.step()
        seconds = time.perf_counter() - began
    trained = sum(param.numel() for param in trainer.params.values())
    moments = sum(t.numel() for state in trainer.optimizer.state.values() for t in state.values())
    rows = config.batch_size * config.num_anchors * config.num_depths
    batches = len(trainer.sampler.epoch(Position(0, 0).epoch))
    width = drafter_config.hidden_size + drafter_config.intermediate_size
    return {
        "parameters": sum(param.numel() for param in drafter.parameters()),
        "trained_parameters": trained,
        "sequences": len(store),
        "tokens": store.manifest["num_tokens"],
        "supervised_tokens": store.manifest["num_supervised"],
        "held_out_sequences": len(trainer.held_out),
        "steps_per_epoch": batches,
        "epochs": round(config.steps / batches, 2),
        "rows_per_step": rows,
        "state_bytes": 4 * (3 * trained + moments),  # weights, gradients, average, moments
        "activation_bytes": 4 * 14 * rows * width // (config.num_depths if config.recompute else 1),
        "seconds_per_step": round(seconds, 3),
        "hours": round(seconds * config.steps / 3600, 2),
        "rows_per_second": round(rows / seconds),
    }
