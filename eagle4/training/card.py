"""The model card of a trained drafter, from what the run knows about itself."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..drafter.model import Eagle4Drafter
from .features import FeatureStore, write_atomically
from .settings import TrainConfig

FILE = "README.md"


def write_card(
    folder: str | os.PathLike,
    target: Any,
    drafter: Eagle4Drafter,
    store: FeatureStore,
    config: TrainConfig,
    metrics: dict[str, Any],
) -> Path:
    """Write ``README.md`` next to a drafter's weights; a card that is there is left alone."""
    path = Path(folder) / FILE
    if not path.exists():
        write_atomically(path, card_text(target, drafter, store, config, metrics))
    return path


def card_text(
    target: Any,
    drafter: Eagle4Drafter,
    store: FeatureStore,
    config: TrainConfig,
    metrics: dict[str, Any],
) -> str:
    """Markdown with the front matter that model hubs read."""
    name = getattr(target.config, "_name_or_path", "") or type(target).__name__
    if Path(name).is_dir():  # a place on somebody's disk says nothing to others
        name = Path(name).name
    count = sum(param.numel() for param in drafter.parameters())
    lines = [
        "---",
        f"base_model: {name}",
        "library_name: eagle4",
        "tags: [speculative-decoding, eagle-4, drafter]",
        "---",
        "",
        f"# EAGLE-4 drafter for {Path(name).name}",
        "",
        f"{count / 1e6:.1f} M parameters. {_structure(drafter)}",
        "",
        "## Data",
        "",
        f"{store.manifest['num_sequences']} sequences, {store.manifest['num_tokens']} tokens, "
        f"{store.manifest['num_supervised']} supervised.",
        "",
        "## Recipe",
        "",
        f"`eagle4 train` for {metrics.get('steps', config.steps)} steps "
        f"({metrics.get('train_seconds', 0) / 60:.0f} minutes); settings: {_changed(config)}",
        "",
        "## Metrics",
        "",
        *_metrics(metrics),
        "",
    ]
    return "\n".join(lines)


def _changed(config: TrainConfig) -> str:
    """The settings that are not the defaults, as they are typed."""
    defaults = dataclasses.asdict(TrainConfig())
    pairs = [(k, v) for k, v in dataclasses.asdict(config).items() if v != defaults[k]]
    return " ".join(f"--set {key}={value}" for key, value in pairs) or "(defaults)"


def _structure(drafter: Eagle4Drafter) -> str:
    config = drafter.config
    parts = [
        f"Taps after blocks {', '.join(map(str, config.tap_layers))}",
        "eh_proj" if config.eh_proj else "EAGLE-3 form (q/k/v read 2H)",
        "RoPE" if config.use_rope else "NoPE",
        f"window {config.sliding_window}" if config.sliding_window else "full attention",
        f"SwiGLU of width {config.intermediate_size}",
    ]
    if config.num_experts:
        parts.append(f"{config.num_experts} experts, {config.num_experts_per_tok} per token")
    if config.draft_vocab_size:
        parts.append(f"{config.draft_vocab_size} of {config.vocab_size} tokens")
    if config.candidate_rank:
        parts.append(
            f"candidate head of rank {config.candidate_rank} with {config.num_candidates} "
            "candidates"
        )
    return "; ".join(parts) + "."


def _metrics(metrics: dict[str, Any]) -> list[str]:
    rows = [
        (
            "held-out accept length, chain, from every slot (bonus included)",
            metrics.get("tau_chain"),
        ),
        ("the same as serving walks through the text", metrics.get("tau_walk")),
        ("held-out accept length, chain, measured in the engine", metrics.get("tau_measured")),
        ("upper bound for a tree of width 4", metrics.get("tau_top4")),
    ]
    lines = ["| metric | value |", "|---|--:|"]
    lines += [f"| {name} | {value:.2f} |" for name, value in rows if value is not None]
    for part, recall in metrics.get("candidate_recall", {}).items():
        lines.append(f"| candidate recall by depth, {part} | {min(recall):.4f} or more |")
    return lines
