"""`eagle4 train` and `eagle4 convert`: everything that makes a drafter of stored features."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..config import Eagle4Config, structural_keys
from ..drafter import Eagle4Drafter
from .common import load_target
from .data import FEATURES


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
    init = None
    if args.init is not None:
        if overrides:
            raise ValueError("--drafter-set and --init exclude each other: a drafter has its shape")
        init = Eagle4Drafter.from_pretrained(args.init, dtype=torch.float32)
    drafter_config = Eagle4Config.for_target(target.config, tap_layers=taps, **overrides)
    _, metrics = train_drafter(
        target,
        tokenizer,
        features,
        args.out,
        drafter_config=drafter_config,
        config=config,
        init=init,
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
