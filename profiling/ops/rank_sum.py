"""What joins the parts of a row-parallel layer: the sum over ranks, the residual and the norm.

    torchrun --nproc-per-node 4 profiling/ops/rank_sum.py [--dtype bfloat16] [--repeats 30]

At the sizes of a decoding step, through every form of `sum_add_norm` that these ranks can use: the
group's own sum (NCCL, gloo on CPUs), the one-shot sum, the fused kernel (``EAGLE4_KERNELS=1``).
Ranks begin at slightly different times and who begins last waits for nobody, so a time is the least
of all ranks' medians. The ceiling is what copying as many bytes in a rank's own memory costs; links
between GPUs are slower. Rank 0 prints; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from ceiling import Setup, copy_bandwidth, median_seconds, plot, size_of
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle4.evaluation.environment import describe_environment
from eagle4.ops import sum_add_norm
from eagle4.parallel import Ranks
from eagle4.parallel.launch import join, launched_size

ROWS = (1, 4, 16, 64)


def options() -> argparse.Namespace:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Times sums over ranks with residual and norm.")
    parser.add_argument("--device", default=kind, choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16" if kind == "cuda" else "float32")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/ops"))
    return parser.parse_args()


def forms(ranks: Ranks) -> dict[str, str]:
    """Forms that all ranks can use, by their names in the report."""
    found = {ranks.backend: "torch"}
    if ranks.sum_impl == "one_shot":
        found["one_shot"] = "one_shot"
    if ranks.is_fused:
        found["fused"] = "triton"
    return found


def measure(ranks: Ranks, setup: Setup, repeats: int) -> list[dict]:
    """Microseconds of every size in every form, and the share of the ceiling of the last form."""
    bandwidth = copy_bandwidth(ranks.device, repeats)
    found = []
    for hidden in (576,) if setup.is_small else (576, 4096):
        norm = LlamaRMSNorm(hidden).to(setup.device, setup.dtype)
        for rows in ROWS:
            part, residual = setup.randn(rows, hidden), setup.randn(rows, hidden)
            # Every part and the residual are read, both results written.
            num_bytes = size_of(part) * (ranks.size + 3) + size_of(norm.weight)
            row: dict = {"case": f"{rows} x {hidden}", "bytes": num_bytes}
            row["ceiling_us"] = round(1e6 * num_bytes / bandwidth, 2)
            for name, impl in forms(ranks).items():
                run = partial(sum_add_norm, part, residual, norm, ranks.name, impl)
                seconds = median_seconds(run, setup.device, repeats)
                row[f"{name}_us"] = round(1e6 * min(ranks.gather_objects(seconds)), 2)
            row["of_ceiling"] = round(row["ceiling_us"] / row[f"{name}_us"], 4)
            found.append(row)
            if ranks.is_first:
                print(row)
    return [{"copy_gb_per_s": round(bandwidth / 1e9, 2)}, *found]


@torch.no_grad()
def main() -> None:
    args = options()
    ranks = join(launched_size(), args.device)
    torch.manual_seed(ranks.rank)
    setup = Setup(ranks.device, getattr(torch, args.dtype), args.device == "cpu")
    head, *rows = measure(ranks, setup, args.repeats)
    if not ranks.is_first:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    series = [*(f"{name}_us" for name in forms(ranks)), "ceiling_us"]
    has_plot = plot("rank_sum", rows, args.out / "rank_sum.png", series)
    result = {"op": "rank_sum", "dtype": args.dtype, "device": args.device, "ranks": ranks.size}
    result |= {"sums": ranks.sums, **head, "cases": rows, "plot": has_plot}
    line = json.dumps(result | {"environment": describe_environment()})
    (args.out / "rank_sum.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
