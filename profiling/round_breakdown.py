"""Where a round's time goes: target forward by rows, drafter level by width, stages of a real run.

    python profiling/round_breakdown.py [--dtype auto] [--context 256] [--repeats 9]

Medians of interleaved repetitions, so a slow moment of the machine hits every row alike. With
EAGLE4_PACK_WEIGHTS=0 the same script shows what packed CPU weights change. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from eagle4 import Eagle4Drafter, Eagle4ForCausalLM, demo
from eagle4.cache import KVPool, PageTable, Window, attend, build_step
from eagle4.evaluation.environment import describe_environment

ROWS = (1, 2, 4, 8, 12, 17, 24, 32)
WIDTHS = (1, 2, 4, 8)


def interleaved(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of every case; the cases take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 2):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()}


def tree_step(table: PageTable, context: int, rows: int, device: torch.device):
    """A chain of ``rows`` behind a committed context."""
    position = torch.arange(context, context + rows, device=device)
    visible = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    return build_step(table, [Window(0, context, 0, position, visible)], device)


def target_by_rows(model: Eagle4ForCausalLM, context: int, repeats: int) -> dict[str, float]:
    device = model.adapter.device
    table, pool = PageTable(1), KVPool()
    table.ensure(0, context + max(ROWS))
    pool.resize(table.num_slots)
    tokens = torch.arange(1, max(ROWS) + 1, device=device)
    with model.adapter.attached():
        cases = {
            str(rows): lambda rows=rows: model.adapter.forward(
                tokens[:rows], tree_step(table, context, rows, device), pool
            )
            for rows in ROWS
        }
        return interleaved(cases, repeats)


def drafter_by_width(model: Eagle4ForCausalLM, context: int, repeats: int) -> dict[str, float]:
    drafter, device = model.drafter, model.adapter.device
    assert drafter is not None and model._packed is not None
    table, pool = PageTable(1), KVPool()
    table.ensure(0, context + max(WIDTHS))
    pool.resize(table.num_slots)

    def level(width: int) -> None:
        step = tree_step(table, context, width, device)
        state = torch.zeros(width, drafter.config.hidden_size, device=device, dtype=drafter.dtype)
        tokens = torch.arange(1, width + 1, device=device)
        out = drafter(
            state, tokens, step.position_R, lambda q, k, v: attend(pool, 0, step, q, k, v)
        )
        drafter.propose(out.head_RH, 4)

    with model.adapter.attached(), model._packed.active():
        return interleaved(
            {str(width): lambda width=width: level(width) for width in WIDTHS}, repeats
        )


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
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    target, tokenizer = demo.smollm2(dtype=args.dtype, device=args.device)
    model = Eagle4ForCausalLM(target, Eagle4Drafter.from_pretrained(demo.drafter_path()))
    result = {
        "target_ms_by_rows": target_by_rows(model, args.context, args.repeats),
        "drafter_level_ms_by_width": drafter_by_width(model, args.context, args.repeats),
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
