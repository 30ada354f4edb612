"""Chat with the demo model; words appear as soon as the target has accepted them.

python examples/stream_chat.py                       # interactive, an empty line ends it
python examples/stream_chat.py --prompt "Tell me a joke."
"""

import argparse
import time

from transformers import TextStreamer

from eagle4 import Eagle4ForCausalLM, demo

options = argparse.ArgumentParser()
options.add_argument("--prompt", action="append", help="ask this instead of reading the keyboard")
options.add_argument("--max-new-tokens", type=int, default=256)
args = options.parse_args()

target, tokenizer = demo.smollm2(dtype="auto")
model = Eagle4ForCausalLM.from_pretrained(target, demo.drafter_path(), tokenizer=tokenizer)

# A streamer only ever sees accepted tokens: a rejected draft is never printed and taken back.
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def questions():
    if args.prompt:
        for text in args.prompt:
            print(f"you> {text}")
            yield text
        return
    while text := input("you> ").strip():
        yield text


conversation = []
for question in questions():
    conversation.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    start = time.perf_counter()
    out = model.generate(
        **inputs,
        speculative="eagle4",
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
        streamer=streamer,
    )
    new = out[0, inputs["input_ids"].shape[1] :]
    speed = len(new) / (time.perf_counter() - start)
    if stats := model.last_speculation:
        print(f"[{speed:.1f} tokens/s, {stats.accept_length:.2f} tokens per verification]\n")
    answer = tokenizer.decode(new, skip_special_tokens=True)
    conversation.append({"role": "assistant", "content": answer})
