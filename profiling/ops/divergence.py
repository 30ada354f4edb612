"""Time of `ops.divergence` by loss: the torch reference, and the kernel where there is a GPU.

    python profiling/ops/divergence.py --rows 256 --vocab 49152

Prints microseconds per row, the bytes that must move (logits read, slope written) over measured
time, and one JSON line.
"""

from __future__ import annotations

import argparse
import json

import torch

from eagle4.ops.divergence import KINDS, divergence
from eagle4.training.sweep import median_us


def measure(rows: int, vocab: int, device: str) -> list[dict]:
    """A row per loss and implementation."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(rows, vocab, generator=generator).to(device) for _ in range(2))
    logp, share = teacher.log_softmax(-1), torch.full((rows,), 0.5, device=device)
    found = []
    for kind in KINDS:
        shared = share if kind == "lk_lambda" else None
        for impl in ("torch", "triton") if device == "cuda" else ("torch",):
            spent = median_us(
                lambda kind=kind, shared=shared, impl=impl: divergence(
                    student, logp, kind, shared, impl=impl
                )
            )
            bandwidth = 3 * student.numel() * 4 / spent / 1e3
            point = {"loss": kind, "impl": impl, "us_per_row": spent / rows, "gb_per_s": bandwidth}
            found.append(point)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=49152)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    points = measure(args.rows, args.vocab, device)
    for point in points:
        print(
            f"{point['loss']:12} {point['impl']:7} {point['us_per_row']:8.1f} us/row "
            f"{point['gb_per_s']:7.1f} GB/s"
        )
    print(json.dumps({"device": device, "rows": args.rows, "vocab": args.vocab, "points": points}))


if __name__ == "__main__":
    main()
