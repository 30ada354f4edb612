"""`eagle4 data`, `eagle4 train` and `eagle4 convert`: everything that makes a drafter."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..config import Eagle4Config, structural_keys
from ..drafter import Eagle4Drafter
from ..drafter.pairing import tokenizer_fingerprint
from .common import load_target

RESPONSES, FEATURES = "responses.jsonl", "features"


def data(args: Namespace) -> int:
    """Let the target answer prompts and store its features. Both parts resume."""
    from ..training import FeatureWriter
    from ..training.data import read_prompts, regenerate, synthesize_prompts, training_sequences
    from ..training.extract import build_store
    from ..training.features import target_identity

    if not args.prompts and not args.synthesize:
        raise ValueError("no prompts: pass --prompts FILE, --synthesize N, or both")
    target, tokenizer, _ = load_target(args)
    folder = Path(args.out)
    prompts = list(read_prompts(args.prompts or [], tokenizer))[: args.limit]
    if args.synthesize:
        prompts += synthesize_prompts(target, tokenizer, args.synthesize, seed=args.seed)
    regenerate(
        target,
        tokenizer,
        prompts,
        folder / RESPONSES,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        seed=args.seed,
    )
    taps = args.tap_layers or Eagle4Config.for_target(target.config).tap_layers
    identity = target_identity(target.config, taps, tokenizer_fingerprint(tokenizer))
    with FeatureWriter(folder / FEATURES, identity) as writer:
        unusable = build_store(target, taps, writer, training_sequences(folder / RESPONSES))
        counts = {name: writer.manifest[name] for name in ("num_sequences", "num_supervised")}
    print(json.dumps({"command": "data", "out": args.out, **counts, "unusable": unusable}))
    return 0


def train(args: Namespace) -> int:
    """Train (or resume) a drafter on what `eagle4 data` wrote."""
    from ..training import FeatureStore, TrainConfig, train_drafter

    names = [field.name for field in dataclasses.fields(TrainConfig)]
    given = {"steps": args.steps, "max_minutes": args.max_minutes, "seed": args.seed}
    given = {name: value for name, value in given.items() if value is not None}
    config = TrainConfig(**{**given, **parse_settings(args.set, names, "--set")})
    features = Path(args.data) / FEATURES
    taps = FeatureStore(features).manifest["target"]["tap_layers"]
    # The drafter borrows embedding and LM head; in fp32 the losses see what they are.
    args.dtype = "float32"
    target, tokenizer, _ = load_target(args)
    overrides = parse_settings(args.drafter_set, sorted(structural_keys()), "--drafter-set")
    drafter_config = Eagle4Config.for_target(target.config, tap_layers=taps, **overrides)
    _, metrics = train_drafter(
        target, tokenizer, features, args.out, drafter_config=drafter_config, config=config
    )
    out = str(Path(args.out) / "drafter")
    print(json.dumps({"command": "train", "out": out, "metrics": metrics}))
    return 0


def convert(args: Namespace) -> int:
    """Load a drafter in any dialect and write it in this library's layout."""
    options: dict[str, Any] = {
        "tap_convention": args.tap_convention,
        "norm_output_means": args.norm_output_means,
    }
    if args.target is not None:
        options["target_config"] = AutoConfig.from_pretrained(args.target)
    drafter = Eagle4Drafter.from_pretrained(args.drafter, dtype=args.dtype, **options)
    drafter.save_pretrained(args.out)
    count = sum(parameter.numel() for parameter in drafter.parameters())
    print(json.dumps({"command": "convert", "out": args.out, "parameters": count}))
    return 0


def parse_settings(pairs: Sequence[str], known: Sequence[str], option: str) -> dict[str, Any]:
    """``KEY=VALUE`` words as a dict; values are JSON where they can be, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in known:
            raise ValueError(f"{option} {pair}: expected KEY=VALUE with a KEY of {list(known)}")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings
