"""Compare policies in a world of scripted acceptance, from one sequence to many.

    python profiling/simulate.py [--machines CPU B300 H200] [--loads 1 8 64 256 512]
    python profiling/simulate.py --table FILE     # one more machine, as `eagle4 profile` found it

Tokens per second over plain decoding for: the best fixed shape and the best gain/cost threshold of
a grid (both tuned for that very load and law), the harness (which starts knowing nothing), the
optimal causal policy of a chain (one sequence, width 1, knows law and costs) and a clairvoyant
policy for scale, which verifies exactly what will be accepted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from eagle4.evaluation.report import markdown_table
from eagle4.harness.profile_file import read
from profiling import world
from profiling.optimum import optimal_rate
from profiling.rivals import fixed, harness, plain, threshold, tuned
from profiling.world import Costs, Draft, Process

SHAPES = [
    *((1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4), (6, 1, 6), (8, 1, 8), (2, 2, 3), (2, 4, 6)),
    *((3, 2, 6), (3, 4, 8), (4, 4, 12), (5, 4, 16), (8, 4, 16), (12, 4, 16)),
]
RATIOS = (0.3, 0.5, 0.7, 1.0, 1.5, 2.5, 4.0)
LAWS = {"good": 1.0, "fair": 0.6, "poor": 0.3, "hostile": 0.03}


def clairvoyant(process: Process, costs: Costs, batch: int, rounds: int, depth: int = 12) -> float:
    """Tokens per second of a policy that drafts and verifies accepted nodes only."""
    draft = Draft(process, rounds * batch, np.random.default_rng(3))
    for _ in range(depth - 1):
        draft.grow(draft.frontier(4))
    right = draft.true_BP.sum(1).reshape(rounds, batch)
    best, step = 0.0, costs.verify(batch)
    for most in range(depth + 1):
        accepted = np.minimum(right, most)
        levels = accepted.max(1)
        ns = sum(
            costs.verify(batch + int(n)) + (int(d) * costs.level(batch) if d else 0)
            for n, d in zip(accepted.sum(1), levels, strict=True)
        )
        best = max(best, (accepted.sum() + rounds * batch) / max(ns, 1))
    return max(best * 1e9, batch / step * 1e9)


def costs_of(path: str) -> Costs:
    """A measured table reduced to the world's few numbers."""
    table, _ = read(Path(path))

    def at(kind: str, rows: int) -> float:
        return float(table.cost_ns(kind, rows, 256))

    row = (at("verify", 17) - at("verify", 1)) / 16
    level_row = (at("level", 16) - at("level", 1)) / 15
    step = at("plain", 1) - row
    return Costs(step, 1, row, row, at("level", 1) - level_row, level_row, at("finish", 1))


def compare(name: str, costs: Costs, law: str, batch: int, budget: int) -> dict:
    """One line of the table."""
    process, rounds = Process.mixed(LAWS[law]), max(60, min(3000, budget // batch))
    base = plain(costs, batch).rate
    few = max(20, rounds // 4)
    line = {
        "machine": name,
        "law": law,
        "sequences": batch,
        "fixed": tuned(fixed(process, costs, batch, few, shape) for shape in SHAPES).rate / base,
        "threshold": tuned(threshold(process, costs, batch, few, r) for r in RATIOS).rate / base,
        "harness": harness(process, costs, batch, rounds).rate / base,
        "clairvoyant": clairvoyant(process, costs, batch, few) / base,
    }
    if batch == 1:
        chain = Process.mixed(LAWS[law], children=1)
        limits = {"mode": "chain", "max_depth": 7}
        optimum = optimal_rate(chain, costs, 7)
        line["chain / optimum"] = harness(chain, costs, 1, rounds, **limits).rate / optimum
    return {key: round(v, 3) if isinstance(v, float) else v for key, v in line.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="+", default=["CPU", "B300", "H200"])
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 8, 64, 256, 512])
    parser.add_argument("--laws", nargs="+", choices=sorted(LAWS), default=list(LAWS))
    parser.add_argument("--table", help="a file of `eagle4 profile`, as one more machine")
    parser.add_argument("--budget", type=int, default=20_000, help="sequence-rounds per line")
    args = parser.parse_args()
    machines = {name: getattr(world, name) for name in args.machines}
    if args.table:
        machines["measured"] = costs_of(args.table)
    lines = []
    for name, costs in machines.items():
        for law in args.laws:
            for batch in args.loads:
                lines.append(compare(name, costs, law, batch, args.budget))
                print(json.dumps(lines[-1]), flush=True)
    head = list(dict.fromkeys(key for line in lines for key in line))
    print(markdown_table(head, [[line.get(key, "") for key in head] for line in lines]))
    print(json.dumps({"lines": lines}))


if __name__ == "__main__":
    main()
