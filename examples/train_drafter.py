"""Train a drafter for the demo target, end to end, and see what it brings.

    python examples/train_drafter.py                                  # minutes: a taste
    python examples/train_drafter.py --prompts my_prompts.jsonl --num-prompts 3000 --minutes 90

The four steps are the library's own; `eagle4 data` and `eagle4 train` do the same from a terminal.
Everything is written below --out, and a second call continues where the first one stopped.
"""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from eagle4 import Eagle4Config, Eagle4ForCausalLM, demo
from eagle4.drafter.pairing import tokenizer_fingerprint
from eagle4.evaluation.arms import make_arms
from eagle4.evaluation.benchmark import BenchConfig, run_benchmark, summarise
from eagle4.evaluation.prompts import BUILT_IN
from eagle4.target import TargetAdapter
from eagle4.training import FeatureWriter, TrainConfig, train_drafter
from eagle4.training.answers import end_ids, regenerate
from eagle4.training.extract import build_store
from eagle4.training.features import target_identity
from eagle4.training.prompts import read_prompts, synthesize_prompts
from eagle4.training.sequences import training_sequences

options = argparse.ArgumentParser()
options.add_argument("--prompts", nargs="*", default=[], help="JSON lines with conversations")
options.add_argument("--num-prompts", type=int, default=64)
options.add_argument("--max-new-tokens", type=int, default=128, help="length of a training answer")
options.add_argument("--minutes", type=float, default=5.0, help="training time")
options.add_argument("--steps", type=int, default=200)
options.add_argument("--out", type=Path, default=Path("runs/example"))
args = options.parse_args()

# fp32: the features and the head that the drafter borrows are stored and used as they are.
target, tokenizer = demo.smollm2(dtype=torch.float32)
config = Eagle4Config.for_target(target.config)
adapter = TargetAdapter(target)

# 1. Prompts, and the target's own answers: a drafter must imitate its target, not a data set.
#    Without a file the target writes the user turns, too.
prompts = list(islice(read_prompts(args.prompts, tokenizer), args.num_prompts))
if not prompts:
    prompts = synthesize_prompts(
        adapter,
        tokenizer,
        args.num_prompts,
        args.out / "synthetic.jsonl",
        ends=end_ids(target, tokenizer),
    )
responses = args.out / "responses.jsonl"
regenerate(adapter, tokenizer, prompts, responses, max_new_tokens=args.max_new_tokens)

# 2. Features: the target runs once over every sequence; training then never needs it again.
identity = target_identity(target.config, config.tap_layers, tokenizer_fingerprint(tokenizer))
with FeatureWriter(args.out / "features", identity) as writer:
    build_store(target, config.tap_layers, writer, training_sequences(responses))

# 3. Training: the drafter is unrolled over its own states, as it will run when it serves.
drafter, metrics = train_drafter(
    target,
    tokenizer,
    args.out / "features",
    args.out,
    drafter_config=config,
    config=TrainConfig(steps=args.steps, max_minutes=args.minutes, eval_every=50),
)
print("held out:", {name: value for name, value in metrics.items() if name.startswith("tau")})

# 4. What counts is the accept length of real decoding, on prompts that training never saw.
bench = BenchConfig(max_new_tokens=64)
contestants: dict[str, Any] = {"this run": drafter}
try:
    contestants["the shipped drafter"] = demo.drafter_path()
except FileNotFoundError:
    print("(the shipped drafter is not here: nothing to compare with)")
for name, contestant in contestants.items():
    model = Eagle4ForCausalLM.from_pretrained(target, contestant, tokenizer=tokenizer)
    arms = make_arms(model, target, ["plain", "eagle4"])
    result = summarise(run_benchmark(arms, BUILT_IN[:2], tokenizer, bench))["all"]["eagle4"]
    print(
        f"{name}: accept length {result['accept_length']:.2f}, "
        f"{result['ratio_to_plain']:.2f} x plain decoding"
    )
print(f"the drafter is in {args.out / 'drafter'}")
