"""Frozen settings of the two training stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained.

    A step takes ``batch_size`` runs of ``num_anchors`` slots through ``num_depths`` depths.
    ``full_vocab_fraction``: the last part of training that scores the whole vocabulary; before it,
    ``num_frequent`` + the batch's own + ``num_sampled`` random tokens. ``max_minutes`` ends a run
    by the clock. ``ema_decay`` 0 switches the weight average off. ``max_skipped`` non-finite steps
    end the run with an error. ``precision``: ``"bfloat16"`` multiplies in bf16 under autocast,
    weights and optimiser state stay float32; ``"auto"`` does so where the device is fast at it.
    """

    steps: int = 1000
    max_minutes: float | None = None
    batch_size: int = 16
    num_anchors: int = 48
    num_depths: int = 5
    depth_decay: float = 0.8
    optimizer: str = "muon"
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_fraction: float = 0.03
    final_lr_fraction: float = 0.02
    clip_norm: float = 1.0
    ema_decay: float = 0.98
    num_frequent: int = 4096
    num_sampled: int = 2048
    full_vocab_fraction: float = 0.1
    held_out_fraction: float = 0.05
    eval_every: int = 100
    eval_runs: int = 24
    eval_depths: int = 8
    checkpoint_every: int = 100
    max_skipped: int = 20
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "num_anchors", "num_depths", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer must be 'muon' or 'adamw', got {self.optimizer!r}")
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise ValueError(
                f"precision must be 'auto', 'float32' or 'bfloat16', got {self.precision!r}"
            )
        for name in ("full_vocab_fraction", "held_out_fraction", "warmup_fraction", "ema_decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class CandidateConfig:
    """How the candidate head is fitted to a trained drafter.

    ``init``: ``"weighted"`` by the drafter's own states, ``"plain"`` truncated SVD, or ``"keep"``
    what the drafter has (continued training). Then ``steps`` steps of ``rows`` states minimise the
    KL from the full head; ``num_runs`` runs of the training data give the states, ``num_depths``
    deep (serving drafts deeper than training).
    """

    init: str = "weighted"
    steps: int = 300
    rows: int = 512
    lr: float = 1e-3
    num_runs: int = 128
    num_depths: int = 8
    num_frequent: int = 4096
    num_sampled: int = 4096
    seed: int = 0

    def __post_init__(self):
        if self.init not in ("weighted", "plain", "keep"):
            raise ValueError(f"init must be 'weighted', 'plain' or 'keep', got {self.init!r}")
