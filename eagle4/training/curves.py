"""Curves of a run, from its ``log.jsonl``: the article's Figure 3.

Held-out accept length (simulated, and measured where the engine decoded), held-out divergence, and
for MoE drafters expert load over its mean. Needs matplotlib; without it nothing is drawn.

    python -m eagle4.training.curves runs/mine
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

from .jsonl import read_rows

logger = logging.getLogger(__name__)
_LENGTHS = {
    "tau_chain": "simulated, from every slot",
    "tau_walk": "simulated, as serving walks",
    "tau_measured": "measured in the engine",
}


def read_log(folder: str | os.PathLike) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(steps, evaluations) of a run; steps that a resumed run repeated appear once, the later."""
    steps, evaluations = {}, {}
    for record in read_rows(Path(folder) / "log.jsonl"):
        (evaluations if "held_out" in record else steps)[record["step"]] = record
    return [steps[k] for k in sorted(steps)], [evaluations[k] for k in sorted(evaluations)]


def draw_curves(folder: str | os.PathLike) -> Path | None:
    """Write ``curves.png`` into the run's folder; None without matplotlib or a log."""
    folder = Path(folder)
    if importlib.util.find_spec("matplotlib") is None or not (folder / "log.jsonl").is_file():
        logger.info("no curves: matplotlib or %s is missing", folder / "log.jsonl")
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, evaluations = read_log(folder)
    load = [(r["step"], r["expert_load"]) for r in steps if "expert_load" in r]
    figure, axes = pyplot.subplots(1, 3 if load else 2, figsize=(15 if load else 10, 4))
    x = [record["step"] for record in evaluations]
    for key, label in _LENGTHS.items():
        points = [(r["step"], r["held_out"][key]) for r in evaluations if key in r["held_out"]]
        if points:
            axes[0].plot(*zip(*points, strict=True), marker=".", label=label)
    axes[0].set(title="held-out accept length (chain)", xlabel="step")
    axes[0].legend()
    if steps:
        axes[1].plot(*_smooth(steps), alpha=0.5, label="training")
    if evaluations:
        kl = [sum(r["held_out"]["kl"]) / len(r["held_out"]["kl"]) for r in evaluations]
        axes[1].plot(x, kl, marker=".", label="held out, KL, mean over depths")
    axes[1].set(title="loss", xlabel="step", yscale="log")
    axes[1].legend()
    if load:
        axes[2].plot(*zip(*load, strict=True))
        axes[2].set(title="expert load: largest over mean", xlabel="step")
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=120)
    pyplot.close(figure)
    return folder / "curves.png"


def _smooth(steps: list[dict[str, Any]], width: int = 20) -> tuple[list[int], list[float]]:
    """Means of ``width`` steps."""
    groups = [steps[i : i + width] for i in range(0, len(steps), width)]
    return [g[-1]["step"] for g in groups], [sum(r["loss"] for r in g) / len(g) for g in groups]


if __name__ == "__main__":
    print(draw_curves(sys.argv[1]))
