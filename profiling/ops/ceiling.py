"""What the operator profiles share: timing, the bandwidth ceiling, the JSON line and the plot.

    python profiling/ops/<operator>.py [--device cuda] [--dtype bfloat16] [--repeats 30] [--out DIR]

Every case says how many bytes it has to move at least; its time is compared with what copying that
many bytes costs at the bandwidth that this device shows in a copy. On a GPU a case is the kernel
and, beside it, the torch reference; on a CPU it is the reference alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from eagle4.evaluation.environment import describe_environment

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}


class Case(NamedTuple):
    """One size of one operator; ``run`` takes the form to run ("torch" or "triton")."""

    name: str
    num_bytes: int  # read and written at least
    run: Callable[[str], object]


class Setup(NamedTuple):
    """What a script needs to make its tensors."""

    device: torch.device
    dtype: torch.dtype
    is_small: bool  # sizes for a CPU

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device=self.device)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of single calls.

    On a GPU by events, each call behind a large write: it empties the L2 cache and keeps the device
    busy until the call's launches are queued, so launch latency is not counted.
    """
    for _ in range(3):
        run()
    if device.type != "cuda":
        return statistics.median(_timed(run) for _ in range(repeats))
    flush = torch.empty(1 << 30, dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        flush.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes per second that a large copy reads and writes together."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device, repeats)


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes of whole tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(cases: Iterable[Case], setup: Setup, repeats: int) -> list[dict]:
    """Microseconds of every case in every form that runs here, beside its ceiling."""
    bandwidth = copy_bandwidth(setup.device, repeats)
    forms = ("triton", "torch") if setup.device.type == "cuda" else ("torch",)
    found = []
    for case in cases:
        row: dict = {"case": case.name, "bytes": case.num_bytes}
        row["ceiling_us"] = round(1e6 * case.num_bytes / bandwidth, 2)
        for form in forms:
            seconds = median_seconds(partial(case.run, form), setup.device, repeats)
            row[f"{form}_us"] = round(1e6 * seconds, 2)
        row["of_ceiling"] = round(row["ceiling_us"] / row[f"{forms[0]}_us"], 4)
        found.append(row)
        print(row)
    return [{"copy_gb_per_s": round(bandwidth / 1e9, 2)}, *found]


FORMS = ("triton_us", "torch_us", "ceiling_us")


def plot(name: str, rows: list[dict], path: Path, forms: Sequence[str] = FORMS) -> bool:
    """Bars of every form and the ceiling; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    series = [key for key in forms if key in rows[0]]
    step = 0.8 / max(len(series), 3)
    for i, key in enumerate(series):
        places = [y + step * (i - 1) for y in range(len(rows))]
        axes.barh(
            places, [row[key] for row in rows], height=0.9 * step, label=key.removesuffix("_us")
        )
    axes.set(title=name, xlabel="microseconds", xscale="log")
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


@contextmanager
def _one_seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@torch.no_grad()
def main(name: str, cases: Callable[[Setup], Iterable[Case]]) -> None:
    """The command line of one operator's script."""
    parser = argparse.ArgumentParser(description=f"Times {name} against the bandwidth ceiling.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--dtype", default="bfloat16" if default == "cuda" else "float32")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/ops"))
    args = parser.parse_args()
    device = torch.device(args.device)
    setup = Setup(device, getattr(torch, args.dtype), device.type == "cpu")
    with _one_seed():
        head, *rows = measure(cases(setup), setup, args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    has_plot = plot(name, rows, args.out / f"{name}.png")
    result = {"op": name, "dtype": args.dtype, "device": str(device), **head, "cases": rows}
    result |= {"plot": has_plot, "environment": describe_environment()}
    line = json.dumps(result)
    (args.out / f"{name}.json").write_text(line + "\n")
    print(line)
