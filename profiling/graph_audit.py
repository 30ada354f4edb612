"""What a compiled generation does besides computing: graphs, breaks, recompiles, host reads.

    python profiling/graph_audit.py [--dtype auto] [--rounds 200] [--batches 1 2 4 8]

Warm-up is timed apart. Afterwards prompts of changing lengths are generated, speculatively with the
harness, and every graph that is still compiled is a finding. Host reads are operators whose result
the host waits for; on a CPU they cost nothing, on a GPU each is a synchronisation. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle4 import Eagle4Drafter, Eagle4ForCausalLM, SpeculativeConfig, demo
from eagle4.engine.canvas import TreeLimits
from eagle4.engine.graphs import num_compiled
from eagle4.engine.warmup import warm_up
from eagle4.evaluation.environment import describe_environment

HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}


class Reads(TorchDispatchMode):
    """Counts operators that make the host wait."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def generate(
    model: Eagle4ForCausalLM, batch: int, source: random.Random, tokens: int, eager: bool = False
) -> int:
    """One call with left-padded prompts of different lengths; returns its rounds."""
    lengths = [source.randint(8, 60) for _ in range(batch)]
    ids = torch.zeros(batch, max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(100, 20000, (length,))
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=tokens,
        do_sample=False,
        speculative="eagle4",
        disable_compile=eager,
    )
    assert model.last_speculation is not None
    return model.last_speculation.rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    args = parser.parse_args()
    target, _ = demo.smollm2(dtype=args.dtype, device=args.device)
    drafter = Eagle4Drafter.from_pretrained(demo.drafter_path())
    model = Eagle4ForCausalLM(target, drafter, compile="on")
    assert model._packed is not None
    limits = TreeLimits.of(SpeculativeConfig(), drafter)
    start = time.perf_counter()
    with model._packed.active():
        for batch in (1, max(args.batches)):
            warm_up(model.graphs(), model.adapter, drafter, batch, limits)
    warm_s, warm_graphs = time.perf_counter() - start, num_compiled()
    source, rounds = random.Random(0), 0
    while rounds < args.rounds:
        for batch in args.batches:
            rounds += generate(model, batch, source, 64)
    late = num_compiled() - warm_graphs
    reads = Reads()
    with reads:  # the host reads between graphs, which eager functions leave where they are
        counted = generate(model, 1, source, 32, eager=True)
    result = {
        "warm_up_s": round(warm_s, 1),
        "graphs": warm_graphs,
        "rounds": rounds,
        "recompiles_after_warm_up": late,
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "host_reads_per_round": {n: round(c / counted, 1) for n, c in reads.found.items()},
        "dtype": str(model.adapter.dtype),
        "environment": describe_environment(),
    }
    for name, value in result.items():
        print(f"{name}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
