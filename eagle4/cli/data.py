"""`eagle4 data`: prompts in, the target's answers and features out. Every part resumes."""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from collections import deque
from pathlib import Path
from typing import Any

from ..config import Eagle4Config
from ..drafter.pairing import tokenizer_fingerprint
from ..target import TargetAdapter
from .common import load_model

PROMPTS, RESPONSES, FEATURES = "synthetic.jsonl", "responses.jsonl", "features"


def data(args: Namespace) -> int:
    """Let the target answer prompts and store its features.

    Ranks compute together; the first has prompts, clock and files.
    """
    from ..training.answers import end_ids
    from ..training.features import target_identity
    from ..training.manifest import made_by
    from ..training.templates import template_fingerprint

    if not (args.prompts or args.synthesize):
        raise ValueError("no prompts: pass --prompts FILE, --synthesize N, or both")
    missing = [path for path in (args.prompts or []) if not Path(path).is_file()]
    if missing:  # before a folder is begun
        raise ValueError(f"{', '.join(missing)}: no such file; give JSON lines with conversations")
    model, target, tokenizer, _ = load_model(args, args.drafter)
    taps = args.tap_layers or Eagle4Config.for_target(target.config).tap_layers
    identity = target_identity(target.config, taps, tokenizer_fingerprint(tokenizer))
    settings = {"max_new_tokens": args.max_new_tokens, "temperatures": args.temperatures}
    if args.max_repeated:
        settings["max_repeated"] = args.max_repeated
    ranks, ends = model.ranks, end_ids(target, tokenizer)
    made = made_by(target, identity, template_fingerprint(tokenizer), settings, ranks)
    if ranks is None or ranks.is_first:
        _write(args, model, tokenizer, ends, made)
    else:
        _follow(args, model, tokenizer, ends, taps)
    return 0


def _write(args: Namespace, model: Any, tokenizer: Any, ends: list[int], made: dict) -> None:
    """Fill the folder, and say what is in it."""
    from ..training.manifest import add_statistics, check_made_by, describe

    folder = Path(args.out)
    check_made_by(folder, made)
    _answer(args, model, tokenizer, folder, ends)
    statistics = add_statistics(folder, folder / RESPONSES, ends)
    print(describe(statistics))
    counts = {"num_sequences": statistics["sequences"], "num_supervised": statistics["supervised"]}
    if not args.no_features:
        counts = _store(model, folder)
    supervised = {"supervised_share": statistics["supervised_share"]}
    print(json.dumps({"command": "data", "out": args.out, **counts, **supervised}))


def _follow(args: Namespace, model: Any, tokenizer: Any, ends: list[int], taps: list[int]) -> None:
    """The part of ranks that `_write` nothing: the same forwards in the same order."""
    from ..engine.continuous import answer_all
    from ..training.answers import answer_jobs
    from ..training.extract import build_store

    if args.synthesize:
        deque(answer_all(model.adapter, (), ends=ends), maxlen=0)
    deque(answer_jobs(model, tokenizer, ()), maxlen=0)
    if not args.no_features:
        build_store(model.target, taps, None, (), ranks=model.ranks)


def _answer(args: Namespace, model: Any, tokenizer: Any, folder: Path, ends: list[int]) -> None:
    """Fill the response file, for at most ``--max-minutes``."""
    from ..training.answers import regenerate
    from ..training.sequences import keep_answers

    began = time.monotonic()
    if args.keep_answers:
        vocab_size = model.target.config.get_text_config(decoder=True).vocab_size
        keep_answers(args.prompts or [], tokenizer, folder / RESPONSES, ends, vocab_size)
    limit = args.max_minutes
    regenerate(
        model,
        tokenizer,
        _prompts(args, model.adapter, tokenizer, folder, ends),
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


def _store(model: Any, folder: Path) -> dict[str, int]:
    from ..training import FeatureWriter
    from ..training.extract import build_store
    from ..training.manifest import read_identity
    from ..training.sequences import training_sequences

    identity, sequences = read_identity(folder), training_sequences(folder / RESPONSES)
    taps = identity["tap_layers"]
    with FeatureWriter(folder / FEATURES, identity) as writer:
        unusable = build_store(model.target, taps, writer, sequences, ranks=model.ranks)
    counts = {name: writer.manifest[name] for name in ("num_sequences", "num_supervised")}
    return {**counts, "unusable": unusable}
