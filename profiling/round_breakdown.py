"""Where a round's time goes: verification by rows, drafter level by width, stages of a real run.

    python profiling/round_breakdown.py [--dtype auto] [--compile auto] [--context 256]

Medians of interleaved repetitions, so a slow moment of the machine hits every row alike. With
EAGLE4_PACK_WEIGHTS=0 the same script shows what packed CPU weights change. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from eagle4 import Eagle4Drafter, Eagle4ForCausalLM, SpeculativeConfig, demo
from eagle4.engine.canvas import TreeLimits
from eagle4.engine.parts import Stage
from eagle4.engine.warmup import warm_up
from eagle4.evaluation.environment import describe_environment

ROWS = (1, 2, 4, 8, 12, 17, 24, 32)
WIDTHS = (1, 2, 4, 8)


def interleaved(cases: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of every case; the cases take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 2):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()}


def parts(model: Eagle4ForCausalLM, context: int, repeats: int) -> dict[str, dict[str, float]]:
    """The target's verification by rows, a drafter level by width, and the ends of a draft."""
    assert model.drafter is not None and model._packed is not None
    graphs, limits = (
        model.graphs(),
        TreeLimits.of(SpeculativeConfig(top_k=max(WIDTHS)), model.drafter),
    )
    with model._packed.active():
        warm_up(graphs, model.adapter, model.drafter, 1, limits)
        with model.adapter.attached(run_blocks=graphs.blocks):
            stage = Stage(model.adapter, model.drafter, 1, context, graphs, limits)
            rows = {str(n): partial(stage.verify, n - 1) for n in ROWS}
            widths = {str(n): partial(stage.level, n) for n in WIDTHS}
            ends = {"depth_0": partial(stage.root, 3), "finish": stage.finish}
            return {
                "verify_ms_by_rows": interleaved(rows, repeats),
                "level_ms_by_width": interleaved(widths, repeats),
                "draft_ends_ms": interleaved(ends, repeats),
            }


def stages(model: Eagle4ForCausalLM, tokenizer, repeats: int) -> dict[str, float]:
    """Milliseconds per round of a real generation, by stage."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Explain how a bicycle stays upright."}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"].to(model.adapter.device)
    for _ in range(max(1, repeats // 4)):
        model.generate(ids, max_new_tokens=64, do_sample=False, speculative="eagle4")
    stats = model.last_speculation
    assert stats is not None
    found = {f"{k}_ms": round(1e3 * v / stats.rounds, 2) for k, v in stats.seconds.items()}
    return found | {
        "rounds": stats.rounds,
        "accept_length": round(stats.accept_length, 3),
        "draft_calls_per_round": round(stats.draft_calls / stats.rounds, 2),
        "host_reads": dict(stats.host_reads),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--launch", default="auto", choices=("auto", "direct", "graphs"))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    target, tokenizer = demo.smollm2(dtype=args.dtype, device=args.device)
    drafter = Eagle4Drafter.from_pretrained(demo.drafter_path())
    model = Eagle4ForCausalLM(target, drafter, compile=args.compile, launch=args.launch)
    result = {
        **parts(model, args.context, args.repeats),
        "round": stages(model, tokenizer, args.repeats),
        "dtype": str(model.adapter.dtype),
        "context": args.context,
        "environment": describe_environment(),
    }
    for name, table in result.items():
        if isinstance(table, dict):
            print(name, *(f"  {key}: {value}" for key, value in table.items()), sep="\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
