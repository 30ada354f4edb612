"""What the drafter's LM head costs by kind of head: reduced vocabulary, full, efficient.

    python profiling/lm_head_share.py [--dtype auto] [--widths 1 4] [--plot heads.png]

The same drafter layer with EAGLE-3's reduced head (32,000 rows), the target's full head, and the
efficient head at two ranks, on a chain (1 row) and a tree level (4 rows): milliseconds of the head
and its share of a drafter level. Weights are random where a kind needs its own: only time is
measured here, acceptance is `eagle4 bench`'s business. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json

import torch
from round_breakdown import interleaved

from eagle4 import Eagle4Config, Eagle4Drafter, demo
from eagle4.engine.parts import Stage
from eagle4.evaluation.environment import describe_environment
from eagle4.ops import PackedLinears
from eagle4.target import TargetAdapter

KINDS = {
    "reduced 32k": {"draft_vocab_size": 32000, "own_lm_head": True, "candidate_rank": 0},
    "full": {"candidate_rank": 0},
    "efficient 128": {"candidate_rank": 128},
    "efficient 512": {"candidate_rank": 512},
}


def drafter_of(kind: str, target) -> Eagle4Drafter:
    """A drafter for the target with that head."""
    config = Eagle4Config.for_target(target.config, **KINDS[kind])
    drafter = Eagle4Drafter(config).to(device=target.device, dtype=target.dtype).eval()
    return drafter.bind(target.get_input_embeddings(), target.get_output_embeddings())


def times(target, kind: str, widths: list[int], repeats: int) -> dict[str, float]:
    """Milliseconds of the head and of a whole level."""
    drafter, device = drafter_of(kind, target), target.device
    stage = Stage(TargetAdapter(target, drafter.config.tap_layers), drafter, 1, 256)

    def step(width: int) -> None:
        stage.level(width)

    def head(width: int) -> None:
        rows = torch.ones(width, drafter.config.hidden_size, device=device, dtype=drafter.dtype)
        drafter.propose(rows, 4)

    with PackedLinears(drafter).active(), PackedLinears(target).active():
        return interleaved(
            {
                f"{part.__name__} {w}": (lambda p=part, w=w: p(w))
                for part in (step, head)
                for w in widths
            },
            repeats,
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--plot", metavar="FILE", help="draw head milliseconds (needs matplotlib)")
    args = parser.parse_args()
    target, _ = demo.smollm2(dtype=args.dtype, device=args.device)
    rows = {}
    for kind in KINDS:
        ms = times(target, kind, args.widths, args.repeats)
        rows[kind] = {
            str(w): {
                "head_ms": ms[f"head {w}"],
                "share": round(ms[f"head {w}"] / ms[f"step {w}"], 3),
            }
            for w in args.widths
        }
        print(kind, rows[kind], flush=True)
    if args.plot:
        draw(rows, args.plot)
    print(json.dumps({"heads": rows, "environment": describe_environment()}))


def draw(rows: dict, path: str) -> None:
    """Bars of head milliseconds, one group per width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    widths = list(next(iter(rows.values())))
    for i, width in enumerate(widths):
        heights = [row[width]["head_ms"] for row in rows.values()]
        places = [k + i * 0.8 / len(widths) for k in range(len(rows))]
        axes.bar(places, heights, 0.8 / len(widths), label=f"{width} rows")
    axes.set_xticks([k + 0.3 for k in range(len(rows))], list(rows))
    axes.set_ylabel("head, ms")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
