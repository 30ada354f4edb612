"""The demo pair against llama.cpp on the same GGUF file, in one process, in turns.

    pip install llama-cpp-python    # builds llama.cpp for this machine
    python profiling/against_llama_cpp.py --prompts mt_bench.jsonl --limit 16 [--compile on]

llama.cpp multiplies with the file's 4-bit weights, this library with the same weights dequantised
(bf16 where that is fast): texts differ, because the arithmetic does. Every arm's time covers
a whole answer from prompt to last token, greedily, with the same number of threads. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from importlib.metadata import version

import torch
from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

from eagle4 import Eagle4Drafter, Eagle4ForCausalLM, demo
from eagle4.evaluation.arms import Arm, ArmRun, eos_ids, make_arms
from eagle4.evaluation.benchmark import BenchConfig, run_benchmark, summarise
from eagle4.evaluation.environment import describe_environment
from eagle4.evaluation.prompts import load_prompts

RIVAL = "llama.cpp"


def llama_arm(llama: Llama, eos: set[int]) -> Arm:
    """Greedy answers of llama.cpp; nothing of an earlier answer is reused."""

    def run(inputs: Mapping[str, torch.Tensor], max_new_tokens: int) -> ArmRun:
        prompt = inputs["input_ids"][0].tolist()
        llama.reset()
        start = time.perf_counter()
        tokens: list[int] = []
        for token in llama.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0, reset=True):
            tokens.append(token)
            if token in eos or len(tokens) == max_new_tokens:
                break
        return ArmRun([tokens], time.perf_counter() - start, None)

    return run


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The demo pair against llama.cpp.")
    parser.add_argument("--prompts", required=True, help="JSON lines")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", default="off", choices=("on", "off"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    target, tokenizer = demo.smollm2(dtype=args.dtype)
    drafter = Eagle4Drafter.from_pretrained(demo.drafter_path())
    model = Eagle4ForCausalLM(target, drafter, compile=args.compile)
    gguf = demo._find_gguf()
    assert gguf is not None, demo.HOW_TO_GET
    llama = Llama(
        str(gguf), n_ctx=2048, n_threads=args.threads, n_threads_batch=args.threads, verbose=False
    )
    arms = {
        **make_arms(model, target, ("transformers", "plain", "eagle4")),
        RIVAL: llama_arm(llama, eos_ids(target.generation_config)),
    }
    config = BenchConfig(max_new_tokens=args.max_new_tokens, repeats=args.repeats)
    cells = run_benchmark(arms, load_prompts(args.prompts, args.limit), tokenizer, config, "cpu")
    found = summarise(cells, (RIVAL, "plain"))["all"]
    for name, arm in found.items():
        print(f"{name:14s} {arm['tokens_per_s']:7.1f} tokens/s")
    setting = {**vars(args), "dtype": str(target.dtype), "rival": version("llama-cpp-python")}
    print(json.dumps({"arms": found, **setting, "environment": describe_environment()}))


if __name__ == "__main__":
    main()
