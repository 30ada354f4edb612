"""Speculative decoding inside `transformers.pipeline`: nothing else in the pipeline changes.

python examples/pipeline.py
"""

from transformers import pipeline

from eagle4 import Eagle4ForCausalLM, demo

target, tokenizer = demo.smollm2(dtype="auto")
model = Eagle4ForCausalLM.from_pretrained(target, demo.drafter_path(), tokenizer=tokenizer)

# A pipeline samples unless it is told otherwise, which speculation serves as well (then add `seed`
# for text that can be repeated); `speculative` may also be given per call.
generator = pipeline(
    "text-generation",
    model=model,
    tokenizer=tokenizer,
    do_sample=False,
    speculative="eagle4",
    max_new_tokens=64,
)

chat = [{"role": "user", "content": "Name three fruits and one thing that is special about each."}]
print(generator(chat)[0]["generated_text"][-1]["content"])
if stats := model.last_speculation:
    print(f"\naccept length {stats.accept_length:.2f}")

# Several prompts at once: each sequence accepts its own number of tokens per round.
texts = ["The three primary colours are", "Once upon a time, in a small village,"]
for answer in generator(texts, batch_size=2, max_new_tokens=24):
    print("\n" + answer[0]["generated_text"])
