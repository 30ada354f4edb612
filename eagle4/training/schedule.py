"""Learning rate over a run: linear warm-up, then one of four ways to ``final_lr_fraction``.

``cosine`` falls all the way, ``linear`` too; ``wsd`` (warm-up, stable, decay) stays at the peak and
falls linearly over the last ``decay_fraction``; ``constant`` never falls.
"""

from __future__ import annotations

import math

from .settings import TrainConfig


def lr_scale(config: TrainConfig, progress: float) -> float:
    """Share of the peak learning rate at ``progress`` in [0, 1] of the run."""
    warm, low = config.warmup_fraction, config.final_lr_fraction
    if progress < warm:
        return max(progress, 0.5 / config.steps) / warm
    phase = (progress - warm) / max(1e-9, 1 - warm)
    if config.schedule == "cosine":
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * phase))
    if config.schedule == "linear":
        return 1 - (1 - low) * phase
    if config.schedule == "wsd":
        left = (1 - progress) / max(1e-9, min(config.decay_fraction, 1 - warm))
        return low + (1 - low) * min(1.0, left)
    return 1.0
