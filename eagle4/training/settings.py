"""Frozen settings of the two training stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops.divergence import KINDS


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained.

    A step takes ``batch_size`` runs of ``num_anchors`` slots through ``num_depths`` depths, over
    all processes; each goes through its share in ``accumulation`` parts. ``loss``: see
    `ops.divergence`; ``lk_eta`` is lk_lambda's. ``depth_decay``: weight of a depth relative to the
    one before, or a weight for every depth. ``full_vocab_fraction``: the last part of training that
    scores the whole vocabulary; before it, ``num_frequent`` + the batch's own + ``num_sampled``
    random tokens. ``feature_noise``: uniform noise on the target's features, as a share of their
    root mean square (EAGLE-1 trains with noise, EAGLE-3 without). ``freeze``: beginnings of
    parameter names that are not trained; a candidate head and what the target lends never are.
    ``lora_rank``: train only low-rank updates of the linear layers of a drafter that training goes
    on from (0: all of its weights); not with ``recompute`` or ``"shard"``.
    ``schedule``: ``"cosine"``, ``"linear"``, ``"wsd"`` (falls over the last ``decay_fraction``) or
    ``"constant"``. ``max_minutes`` ends a run by the clock. ``ema_decay`` 0 switches the weight
    average off. ``max_skipped`` non-finite steps end the run with an error. ``precision``:
    ``"bfloat16"`` multiplies in bf16 under autocast, weights and optimiser state stay float32;
    ``"auto"`` does so where the device is fast at it. ``recompute``: activations of a depth are
    computed again in the backward pass instead of kept. ``compile``: the depths run as compiled
    graphs, which costs minutes before the first step; not with ``"shard"``. ``attention``:
    ``"dense"`` or, in compiled training on CUDA, ``"flex"`` (FlexAttention, which needs no memory
    for scores; long contexts do). ``sharding`` with several processes: ``"replicate"`` (DDP) or
    ``"shard"`` (FSDP2).

    Every ``eval_every`` steps ``eval_runs`` held-out runs are scored ``eval_depths`` deep, and the
    engine decodes ``decode_prompts`` held-out prompts (0: none) for ``decode_tokens`` tokens; kept
    is the last checkpoint within a standard error of the longest measured accept length, or the one
    with the longest simulated length where nothing is decoded. ``balance_rate``: step of an MoE
    router's bias; ``balance_loss``: weight of its auxiliary loss. ``trackers``: names that
    accelerate knows, such as ``"tensorboard"``.
    """

    steps: int = 1000
    max_minutes: float | None = None
    batch_size: int = 16
    accumulation: int = 1
    num_anchors: int = 48
    num_depths: int = 5
    loss: str = "forward_kl"
    lk_eta: float = 3.0
    depth_decay: float | tuple[float, ...] = 0.8
    optimizer: str = "muon"
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: str = "cosine"
    warmup_fraction: float = 0.03
    decay_fraction: float = 0.2
    final_lr_fraction: float = 0.02
    clip_norm: float = 1.0
    ema_decay: float = 0.98
    feature_noise: float = 0.0
    freeze: tuple[str, ...] = ()
    lora_rank: int = 0
    num_frequent: int = 4096
    num_sampled: int = 2048
    full_vocab_fraction: float = 0.1
    held_out_fraction: float = 0.05
    eval_every: int = 100
    eval_runs: int = 24
    eval_depths: int = 8
    decode_prompts: int = 16
    decode_tokens: int = 48
    checkpoint_every: int = 100
    max_skipped: int = 20
    precision: str = "auto"
    recompute: bool = False
    compile: bool = False
    attention: str = "dense"
    sharding: str = "replicate"
    balance_rate: float = 1e-3
    balance_loss: float = 0.0
    trackers: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self):
        for name in ("betas", "freeze", "trackers"):  # lists come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.depth_decay, list):
            object.__setattr__(self, "depth_decay", tuple(self.depth_decay))
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {list(allowed)}, got {getattr(self, name)!r}"
                )
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must be 0 or more, got {self.lora_rank}")
        if self.lora_rank and (self.recompute or self.sharding == "shard"):
            raise ValueError('lora_rank goes neither with recompute nor with sharding="shard"')
        if self.attention == "flex" and not self.compile:
            raise ValueError("attention='flex' is slow unless compiled; set compile=True as well")
        if self.compile and self.sharding == "shard":
            raise ValueError('compile=True does not go with sharding="shard", whose hooks gather')
        for name in _FRACTIONS:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    def uses_flex(self, device: torch.device) -> bool:
        """Whether attention is FlexAttention; `ValueError` where it cannot train on ``device``."""
        if self.attention == "flex" and device.type != "cuda":
            raise ValueError(
                f"attention='flex' has no backward pass on {device.type}, only on CUDA; "
                "use attention='dense'"
            )
        return self.attention == "flex"


_AT_LEAST_ONE = ("steps", "batch_size", "accumulation", "num_anchors", "num_depths", "eval_every")
_FRACTIONS = (
    *("full_vocab_fraction", "held_out_fraction", "warmup_fraction", "decay_fraction"),
    *("final_lr_fraction", "ema_decay", "feature_noise"),
)
_CHOICES = {
    "optimizer": ("muon", "adamw"),
    "precision": ("auto", "float32", "bfloat16"),
    "loss": KINDS,
    "attention": ("dense", "flex"),
    "schedule": ("cosine", "linear", "wsd", "constant"),
    "sharding": ("replicate", "shard"),
}


@dataclass(frozen=True, kw_only=True)
class CandidateConfig:
    """How the candidate head is fitted to a trained drafter.

    ``init``: ``"weighted"`` by the drafter's own states, ``"frequency"`` of tokens in the data,
    ``"both"``, ``"plain"`` truncated SVD, or ``"keep"`` what the drafter has (continued training).
    Then ``steps`` steps of ``rows`` states minimise the KL from the full head; ``num_runs`` runs of
    the training data give the states, ``num_depths`` deep (serving drafts deeper than training).
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
        if self.init not in _INITS:
            raise ValueError(f"init must be one of {list(_INITS)}, got {self.init!r}")


_INITS = ("weighted", "frequency", "both", "plain", "keep")
