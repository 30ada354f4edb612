"""`eagle4 profile`: measure this machine with the loaded pair, print and keep the cost table."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from ..engine.home import fingerprint, measure_pair, profile_path
from ..engine.measure import COARSE, FINE
from ..evaluation.environment import describe_environment
from ..evaluation.report import markdown_table
from ..harness import CostTable
from ..harness.acceptance import Experience
from ..harness.agreed import AgreedTable
from ..harness.profile_file import read_or_none, write
from .common import load_pair


def profile(args: Namespace) -> int:
    """Measure, print, write; what earlier runs learned about acceptance is kept.

    Ranks measure together; the table of the slowest is kept.
    """
    model = load_pair(args).model
    graphs = model.graphs()
    here = fingerprint(model.adapter, model.drafter, graphs)
    path = Path(args.out) if args.out else profile_path(here)
    known = read_or_none(path, here)
    with model._packed.active():
        grid = COARSE if args.coarse else FINE
        table = measure_pair(model.adapter, model.drafter, grid, here, graphs)
    experience = known[1] if known else Experience()
    ranks = model.ranks
    if ranks is not None:
        table = AgreedTable(ranks.gather_objects(table), ranks.largest)
    if ranks is None or ranks.is_first:
        write(path, table, experience)
    print(markdown(table))
    if args.plot and (ranks is None or ranks.is_first):
        plot(table, experience, Path(args.plot))
    facts = {name: describe_environment()[name] for name in ("hardware", "commit", "date")}
    record = {"command": "profile", "file": str(path), "cost": table.to_dict()["surfaces"]}
    print(json.dumps(record | facts | {"plot": args.plot}))
    return 0


def markdown(table: CostTable) -> str:
    """Milliseconds with half the interquartile range, per part."""
    parts = []
    for kind, surface in table.surfaces.items():
        lines = [
            [rows, *(f"{ns / 1e6:.2f} ±{s / 1e6:.2f}" for ns, s in zip(a, b, strict=True))]
            for rows, a, b in zip(surface.rows, surface.ns, surface.spread, strict=True)
        ]
        head = ["rows", *(f"context {context}, ms" for context in surface.contexts)]
        parts += [f"## {kind}", markdown_table(head, lines)]
    return "\n\n".join(parts)


def plot(table: CostTable, experience: Experience, path: Path) -> None:
    """Draw the latencies and the reliability diagram. Raises `ImportError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'eagle4[plot]'") from error
    figure = Figure(figsize=(13, 4), layout="constrained")
    target, drafter, trust = figure.subplots(1, 3)
    for axes, kinds in ((target, ("verify", "plain")), (drafter, ("root", "level", "finish"))):
        for kind in kinds:
            surface = table.surfaces[kind]
            for j, context in enumerate(surface.contexts):
                times = [line[j] / 1e6 for line in surface.ns]
                error = [line[j] / 1e6 for line in surface.spread]
                axes.errorbar(surface.rows, times, error, label=f"{kind}, context {context}")
        axes.set(xlabel="rows", ylabel="milliseconds", xscale="log", ylim=(0, None))
        axes.legend(fontsize="small")
    rows = experience.overall.reliability()
    trust.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    trust.scatter(
        [row["probability"] for row in rows],
        [row["observed"] for row in rows],
        [4 + 2 * row["trials"] ** 0.5 for row in rows],
        label="observed",
    )
    trust.plot([r["probability"] for r in rows], [r["calibrated"] for r in rows], label="used")
    trust.set(xlabel="draft probability", ylabel="acceptance", xlim=(0, 1), ylim=(0, 1))
    trust.legend(fontsize="small")
    figure.savefig(path)
