"""The harness against a grid of fixed shapes and plain decoding, on real prompts: one table.

    python profiling/harness_table.py --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl \\
        --limit 8 --batch-sizes 1 2 4 8 --out results/harness

Two sets are made here: ``copy`` (the prompt asks for its own text) and ``hostile`` (a processor
makes every next token pseudo-random, so nothing can be predicted). All arms answer every batch in
one process, interleaved in rotating order; figures are quotients of all tokens per all seconds. The
first ``--warmup`` batches of a set are forgotten. The last line is JSON.

In bf16 the texts of two arms part at near ties, and a sequence may then end early in one of them
and fill a batch in the other. ``--whole`` lets no sequence end, so that batches are equal.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from eagle4 import Eagle4Drafter, Eagle4ForCausalLM, SpeculativeConfig, demo
from eagle4.evaluation.arms import make_arm
from eagle4.evaluation.benchmark import BenchConfig, Cell, run_benchmark
from eagle4.evaluation.environment import describe_environment
from eagle4.evaluation.prompts import Prompt, load_prompts
from eagle4.evaluation.report import markdown_table

GRID = ((1, 1, 1), (2, 1, 2), (3, 1, 3), (2, 4, 5), (3, 4, 8), (4, 4, 10), (6, 4, 16), (12, 4, 16))
PLAIN, HARNESS = "plain", "harness"


class PseudoRandom(LogitsProcessor):
    """Every next token follows from the length alone, as a hash: no drafter can know it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = (input_ids.shape[1] * 2654435761 + 12345) % (1 << 32) % scores.shape[-1]
        scores = scores.clone()
        scores[:, token] += 1e4
        return scores


def copy_prompts(prompts: list[Prompt]) -> list[Prompt]:
    """Ask for the text of other prompts, word for word."""
    return [
        Prompt(
            prompt_id=f"copy-{prompt.prompt_id}",
            category="copy",
            turns=[f"Repeat this text word for word, nothing else:\n\n{prompt.turns[0]}"],
        )
        for prompt in prompts
    ]


def arms_of(model: Eagle4ForCausalLM, grid, extra: dict[str, Any]) -> dict[str, Any]:
    """Plain, the harness, and every fixed shape."""
    arms = {
        PLAIN: make_arm(model, speculative=None, **extra),
        HARNESS: make_arm(model, speculative="eagle4", **extra),
    }
    for depth, width, nodes in grid:
        fixed = SpeculativeConfig(max_depth=depth, top_k=width, max_nodes=nodes, harness=False)
        arms[f"{depth}/{width}/{nodes}"] = make_arm(model, speculative=fixed, **extra)
    return arms


def row_of(name: str, batch: int, cells: list[Cell]) -> dict[str, Any]:
    """Quotients of rates; the best fixed shape is the one with the best rate."""

    def rate(arm: str) -> float:
        # Batches of one set differ in length and acceptance; few of them have no stable median.
        tokens = sum(cell.runs[arm][0].num_tokens for cell in cells)
        return tokens / sum(cell.seconds(arm) for cell in cells)

    def ratio(arm: str, base: str) -> float:
        return rate(arm) / rate(base)

    fixed = [arm for arm in cells[0].runs if arm not in (PLAIN, HARNESS)]
    best = max(fixed, key=lambda arm: ratio(arm, PLAIN))
    equal = sum(cell.runs[HARNESS][0].tokens == cell.runs[PLAIN][0].tokens for cell in cells)
    statistics = [cell.runs[HARNESS][0].speculation or {} for cell in cells]
    return {
        "set": name,
        "batch": batch,
        "harness_vs_plain": round(ratio(HARNESS, PLAIN), 3),
        "best_fixed": best,
        "best_fixed_vs_plain": round(ratio(best, PLAIN), 3),
        "harness_vs_best_fixed": round(ratio(HARNESS, best), 3),
        "accept_length": round(median(s.get("accept_length", 1.0) for s in statistics), 2),
        "plain_rounds": sum(s.get("plain_rounds", 0) for s in statistics),
        "rounds": sum(s.get("rounds", 0) for s in statistics),
        "equal": f"{equal}/{len(cells)}",
        "fixed_vs_plain": {arm: round(ratio(arm, PLAIN), 3) for arm in fixed},
    }


def _shape(text: str) -> tuple[int, ...]:
    depth, width, nodes = (int(number) for number in text.split("/"))
    return depth, width, nodes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", required=True, help="JSON lines, one set each")
    parser.add_argument("--limit", type=int, default=8, help="prompts per set")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafter", help="folder (default: the shipped one)")
    parser.add_argument(
        "--grid",
        nargs="+",
        type=_shape,
        default=GRID,
        metavar="D/K/N",
        help="fixed shapes: depth, children per node, nodes (default: eight of them)",
    )
    parser.add_argument(
        "--whole", action="store_true", help="nothing ends before --max-new-tokens: equal batches"
    )
    parser.add_argument("--out", help="write OUT.json and OUT.md")
    return parser.parse_args()


def main() -> None:
    args = parse()
    target, tokenizer = demo.smollm2(dtype=args.dtype, device=args.device)
    drafter = Eagle4Drafter.from_pretrained(args.drafter or demo.drafter_path())
    model = Eagle4ForCausalLM(target, drafter)
    if args.whole:
        model.generation_config.eos_token_id = None
    sets = {Path(path).stem: load_prompts(path, args.limit) for path in args.prompts}
    first = next(iter(sets.values()))
    sets |= {"copy": copy_prompts(first), "hostile": first}
    rows = []
    for batch in args.batch_sizes:
        config = BenchConfig(
            max_new_tokens=args.max_new_tokens,
            batch_size=batch,
            repeats=args.repeats,
            warmup=args.warmup,
            reference=PLAIN,
        )
        for name, prompts in sets.items():
            processors = LogitsProcessorList([PseudoRandom()])
            extra = {"logits_processor": processors} if name == "hostile" else {}
            arms = arms_of(model, args.grid, extra)
            cells = run_benchmark(arms, prompts, tokenizer, config, args.device)
            rows.append(row_of(name, batch, cells))
            print(json.dumps(rows[-1]), flush=True)
    head = [key for key in rows[0] if key != "fixed_vs_plain"]
    table = markdown_table(head, [[row[key] for key in head] for row in rows])
    print(table)
    record = {"rows": rows, "environment": describe_environment()}
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{args.out}.json").write_text(json.dumps(record, indent=1))
        Path(f"{args.out}.md").write_text(table + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
