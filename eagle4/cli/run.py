"""`eagle4 generate` and `eagle4 chat`: text on stdout, statistics on stderr."""

from __future__ import annotations

import sys
import time
from argparse import Namespace

from transformers import TextStreamer

from ..evaluation.prompts import Message, encode
from .common import Loaded, decoding, load_pair, speculation


def generate(args: Namespace) -> int:
    """Answer ``--prompt``."""
    loaded = load_pair(args)
    if args.raw:
        inputs = loaded.tokenizer(args.prompt, return_tensors="pt").to(loaded.device)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    else:
        conversation = [*_system(args), {"role": "user", "content": args.prompt}]
        inputs = encode(loaded.tokenizer, [conversation], loaded.device)
    _answer(loaded, inputs, args)
    return 0


def chat(args: Namespace) -> int:
    """Read user messages until an empty line, keep the conversation, answer each."""
    loaded = load_pair(args)
    conversation = _system(args)
    while text := _ask():
        conversation.append({"role": "user", "content": text})
        inputs = encode(loaded.tokenizer, [conversation], loaded.device)
        answer = _answer(loaded, inputs, args)
        conversation.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str:
    try:
        return input("you> ").strip()
    except EOFError:
        print()
        return ""


def _system(args: Namespace) -> list[Message]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _answer(loaded: Loaded, inputs, args: Namespace) -> str:
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    start = time.perf_counter()
    out = loaded.model.generate(
        **inputs,
        speculative=None if args.plain else speculation(args),
        max_new_tokens=args.max_new_tokens,
        **decoding(args),
        return_dict_in_generate=True,
        streamer=streamer,
    )
    seconds = time.perf_counter() - start
    new = out.sequences[0, inputs["input_ids"].shape[1] :]
    stats = out.speculation
    speed = f"{len(new)} tokens, {len(new) / seconds:.1f} tokens/s"
    calls = f"{stats.target_calls} target calls, accept length {stats.accept_length:.2f}"
    print(f"[{speed}, {calls}]", file=sys.stderr)
    if stats.exchange is not None:
        sent, whole = (stats.exchange[f"{name}_bytes_per_round"] for name in ("verify", "whole"))
        share = f"{sent:.0f} bytes per verification, {sent / whole:.2%} of whole logits"
        ranks = f"{stats.exchange['ranks']} ranks, sums by {stats.exchange['sums']}"
        print(f"[{ranks}, {share}]", file=sys.stderr)
    return loaded.tokenizer.decode(new, skip_special_tokens=True)
