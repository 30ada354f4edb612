"""`eagle4 data`: prompts in, the target's answers and features out. Every part resumes."""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..config import Eagle4Config
from ..drafter.pairing import tokenizer_fingerprint
from ..modeling import Eagle4ForCausalLM
from ..target import TargetAdapter
from .common import load_target

PROMPTS, RESPONSES, FEATURES = "synthetic.jsonl", "responses.jsonl", "features"


def data(args: Namespace) -> int:
    """Let the target answer prompts and store its features."""
    from ..training.answers import end_ids
    from ..training.features import target_identity
    from ..training.manifest import add_statistics, check_made_by, describe, made_by
    from ..training.templates import template_fingerprint

    if not (args.prompts or args.synthesize):
        raise ValueError("no prompts: pass --prompts FILE, --synthesize N, or both")
    missing = [path for path in (args.prompts or []) if not Path(path).is_file()]
    if missing:  # before a folder is begun
        raise ValueError(f"{', '.join(missing)}: no such file; give JSON lines with conversations")
    target, tokenizer, _ = load_target(args)
    folder, ends = Path(args.out), end_ids(target, tokenizer)
    taps = args.tap_layers or Eagle4Config.for_target(target.config).tap_layers
    identity = target_identity(target.config, taps, tokenizer_fingerprint(tokenizer))
    settings = {"max_new_tokens": args.max_new_tokens, "temperatures": args.temperatures}
    if args.max_repeated:
        settings["max_repeated"] = args.max_repeated
    check_made_by(folder, made_by(target, identity, template_fingerprint(tokenizer), settings))
    _answer(args, target, tokenizer, folder, ends)
    statistics = add_statistics(folder, folder / RESPONSES, ends)
    print(describe(statistics))
    counts = {"num_sequences": statistics["sequences"], "num_supervised": statistics["supervised"]}
    if not args.no_features:
        counts = _store(target, taps, identity, folder)
    supervised = {"supervised_share": statistics["supervised_share"]}
    print(json.dumps({"command": "data", "out": args.out, **counts, **supervised}))
    return 0


def _answer(args: Namespace, target: Any, tokenizer: Any, folder: Path, ends: list[int]) -> None:
    """Fill the response file, for at most ``--max-minutes``."""
    from ..training.answers import regenerate
    from ..training.sequences import keep_answers

    began = time.monotonic()
    if args.keep_answers:
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        keep_answers(args.prompts or [], tokenizer, folder / RESPONSES, ends, vocab_size)
    adapter = TargetAdapter(target)
    prompts = _prompts(args, adapter, tokenizer, folder, ends)
    model: Any = adapter
    if args.drafter is not None:
        model = Eagle4ForCausalLM.from_pretrained(target, args.drafter, tokenizer=tokenizer)
    limit = args.max_minutes
    regenerate(
        model,
        tokenizer,
        prompts,
        folder / RESPONSES,
        max_new_tokens=args.max_new_tokens,
        temperatures=args.temperatures,
        num_rows=args.batch_size,
        seed=args.seed,
        max_repeated=args.max_repeated,
        deadline=None if limit is None else began + 60 * limit,
    )


def _prompts(
    args: Namespace, adapter: TargetAdapter, tokenizer: Any, folder: Path, ends: list[int]
) -> list:
    """Prompts of the files and of the target itself, mixed so that an early end keeps the mix."""
    from ..training.prompts import read_prompts, read_starters, synthesize_prompts

    files = [] if args.keep_answers else args.prompts or []
    prompts = list(read_prompts(files, tokenizer))[: args.limit]
    if args.synthesize:
        prompts += synthesize_prompts(
            adapter,
            tokenizer,
            args.synthesize,
            folder / PROMPTS,
            ends=ends,
            starters=read_starters(args.starters) if args.starters else ("",),
            num_rows=args.batch_size,
            seed=args.seed,
        )
    random.Random(args.seed).shuffle(prompts)
    return prompts


def _store(target: Any, taps: list[int], identity: dict, folder: Path) -> dict[str, int]:
    from ..training import FeatureWriter
    from ..training.extract import build_store
    from ..training.sequences import training_sequences

    with FeatureWriter(folder / FEATURES, identity) as writer:
        unusable = build_store(target, taps, writer, training_sequences(folder / RESPONSES))
    counts = {name: writer.manifest[name] for name in ("num_sequences", "num_supervised")}
    return {**counts, "unusable": unusable}
