"""What a warm start saves: an EAGLE-3 drafter mapped to the EAGLE-4 form against a random one.

An EAGLE-3 drafter is trained for long, mapped with `training.warm_start`, and trained on; a random
EAGLE-4 drafter is trained for the same steps. The curve is the held-out accept length (chain) by
step; the number is the share of steps after which the warm one has passed the random one's best.

    python profiling/warm_start.py                       # a small random target, a minute
    python profiling/warm_start.py --data runs/mine      # the demo target on stored features
    python profiling/warm_start.py --plot warm_start.png
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from eagle4 import Eagle4Config, Eagle4Drafter, demo
from eagle4.training import FeatureStore, TrainConfig
from eagle4.training.curves import read_log
from eagle4.training.recipe import start_drafter
from eagle4.training.trainer import Trainer
from eagle4.training.warm_start import goal_config

try:
    from small_target import small_store, small_target
except ImportError:  # as a module
    from .small_target import small_store, small_target

EAGLE3 = {"eh_proj": False, "norm_output": False, "fc_norm": False, "candidate_rank": 0}
SOURCE = 4  # steps of the EAGLE-3 drafter in those of the others


def setting(data: str | None, folder: Path, steps: int) -> tuple[Any, FeatureStore, TrainConfig]:
    """(target, features, settings): the small target, or the demo target with stored features."""
    config = TrainConfig(steps=steps, eval_every=max(1, steps // 16), checkpoint_every=10**6)
    if data is not None:
        target, _ = demo.smollm2(dtype=torch.float32)
        return target, FeatureStore(Path(data) / "features"), config
    target = small_target()
    store = small_store(target, folder / "store")
    small = dataclasses.replace(config, num_anchors=24, batch_size=8, lr=5e-3, num_depths=4)
    return target, store, dataclasses.replace(small, held_out_fraction=0.15, precision="float32")


def curve(target, store, folder, drafter_config, config, init=None) -> list[tuple[int, float]]:
    """Train; (step, held-out accept length) of every evaluation, the start included."""
    drafter = start_drafter(target, drafter_config, store, config, init)
    trainer = Trainer(drafter, store, folder, config, is_continued=True)
    trainer.train()
    drafter.save_pretrained(folder / "drafter")
    return [(r["step"], r["held_out"]["tau_chain"]) for r in read_log(folder)[1]]


def compare(data: str | None, steps: int, folder: Path) -> dict[str, Any]:
    """The three curves and the share of steps that the warm start needs."""
    target, store, config = setting(data, folder, steps)
    taps = store.manifest["target"]["tap_layers"]
    eagle3 = Eagle4Config.for_target(target.config, tap_layers=taps, **EAGLE3)
    # The drafter that somebody has was trained for long.
    longer = dataclasses.replace(config, steps=SOURCE * steps, eval_every=SOURCE * steps)
    curves = {"EAGLE-3": curve(target, store, folder / "eagle3", eagle3, longer)}
    source = Eagle4Drafter.from_pretrained(folder / "eagle3" / "drafter")
    goal = goal_config(source.config, candidate_rank=0)
    for name, init in (("EAGLE-4, random start", None), ("EAGLE-4, warm start", source)):
        curves[name] = curve(target, store, folder / name, goal, config, init)
    best = max(length for _, length in curves["EAGLE-4, random start"])
    passed = [step for step, length in curves["EAGLE-4, warm start"] if length >= best]
    share = passed[0] / steps if passed else None
    return {"curves": curves, "best_of_random": best, "share_of_steps": share, "steps": steps}


def plot(curves: dict[str, list[tuple[int, float]]], path: str) -> None:
    """All curves in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, points in curves.items():
        pyplot.plot(*zip(*points, strict=True), marker=".", label=name)
    pyplot.xlabel("step")
    pyplot.ylabel("held-out accept length (chain)")
    pyplot.legend()
    pyplot.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="folder of `eagle4 data` for the demo target")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(args.data, args.steps, Path(folder))
    if args.plot:
        plot(found["curves"], args.plot)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
