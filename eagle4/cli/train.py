"""`eagle4 train` and `eagle4 convert`: everything that makes a drafter of stored features."""

from __future__ import annotations

import dataclasses
import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from ..config import Eagle4Config, structural_keys
from ..drafter import Eagle4Drafter
from ..drafter.export import export
from .common import DEMO, load_target
from .data import FEATURES, RESPONSES

if TYPE_CHECKING:
    from ..training import FeatureStore


def train(args: Namespace) -> int:
    """Train (or resume) a drafter on what `eagle4 data` wrote."""
    from ..training import FeatureStore, TrainConfig, train_drafter
    from ..training.manifest import read_identity
    from ..training.online import OnlineFeatures
    from ..training.settings import CandidateConfig

    given = {"steps": args.steps, "max_minutes": args.max_minutes, "seed": args.seed}
    config = _settings(TrainConfig, given, args.set, "--set")
    candidates = _settings(CandidateConfig, {}, args.candidate_set, "--candidate-set")
    # Wrong folders are found out before the target loads.
    folders = [Path(folder) for folder in args.data]
    if args.online and len(folders) > 1:
        raise ValueError(f"--online reads one folder of --data, got {len(folders)}")
    store = None if args.online else FeatureStore(*(folder / FEATURES for folder in folders))
    identity = read_identity(folders[0]) if store is None else store.manifest["target"]
    # The drafter borrows embedding and LM head; in fp32 the losses see what they are.
    args.dtype, args.device = "float32", _own_device(args.device)
    target, tokenizer, _ = load_target(args)
    drafter_config, init = _start(args, target, identity["tap_layers"])
    if store is None:
        store = OnlineFeatures(folders[0] / RESPONSES, identity, target)
    if args.sweep:
        return _sweep(args, target, init, store, config, candidates)
    if args.dry_run:
        return _dry_run(args, target, drafter_config, store, config)
    _, metrics = train_drafter(
        *(target, tokenizer, store, args.out),
        drafter_config=drafter_config,
        config=config,
        candidates=candidates,
        init=init,
    )
    out = str(Path(args.out) / "drafter")
    print(json.dumps({"command": "train", "out": out, "metrics": metrics}))
    return 0


def _settings(kind: Any, given: dict[str, Any], pairs: Sequence[str], option: str) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    given = {name: value for name, value in given.items() if value is not None}
    return kind(**{**given, **parse_settings(pairs, names, option)})


def _own_device(device: str | None) -> str:
    """One GPU per process where there are some and nothing else is asked for."""
    count = torch.cuda.device_count()
    if count and device in (None, "cuda"):
        return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % count}"
    return device or "cpu"


def _start(
    args: Namespace, target: Any, taps: list[int]
) -> tuple[Eagle4Config, Eagle4Drafter | None]:
    """The drafter's form, and the drafter that training starts from."""
    from ..training.warm_start import goal_config

    overrides = parse_settings(args.drafter_set, sorted(structural_keys()), "--drafter-set")
    if args.init is None:
        return Eagle4Config.for_target(target.config, tap_layers=taps, **overrides), None
    init = Eagle4Drafter.from_pretrained(
        args.init, dtype=torch.float32, target_config=target.config
    )
    return goal_config(init.config, **overrides), init


def _sweep(
    args: Namespace, target: Any, init: Any, store: FeatureStore, config: Any, candidates: Any
) -> int:
    """Candidate heads of several ranks for a trained drafter: recall against cost."""
    from ..training.recipe import start_drafter
    from ..training.sweep import as_table, sweep
    from ..training.trainer import Trainer

    if init is None:
        raise ValueError("--sweep compares candidate heads of a trained drafter; pass it as --init")
    ranks = [int(word) for word in args.sweep.split(",")]
    drafter = start_drafter(target, init.config, store, config, init)
    trainer = Trainer(drafter, store, Path(args.out), config)
    counts = [init.config.num_candidates]
    points = sweep(trainer, drafter, ranks, counts, candidates)
    print(as_table(points))
    records = [{**point._asdict(), "speedup": point.speedup} for point in points]
    print(json.dumps({"command": "train", "sweep": records}))
    return 0


def _dry_run(
    args: Namespace, target: Any, drafter_config: Eagle4Config, store: FeatureStore, config: Any
) -> int:
    """Counts, memory and time of a run that is not made."""
    from ..training.estimate import estimate

    found = estimate(target, drafter_config, store, config)
    for name, value in found.items():
        print(f"{name:24} {value:,}" if isinstance(value, int) else f"{name:24} {value}")
    print(json.dumps({"command": "train", "dry_run": True, **found}))
    return 0


def convert(args: Namespace) -> int:
    """Load a drafter in any dialect and write it in this library's layout or another's."""
    options: dict[str, Any] = {
        "tap_convention": args.tap_convention,
        "norm_output_means": args.norm_output_means,
    }
    on_cpu = Namespace(**{**vars(args), "device": "cpu"})
    target = load_target(on_cpu)[0] if args.target == DEMO else None
    if target is not None:
        options["target_config"] = target.config
    elif args.target is not None:
        options["target_config"] = AutoConfig.from_pretrained(args.target)
    drafter = Eagle4Drafter.from_pretrained(args.drafter, dtype=args.dtype, **options)
    own = drafter.config.own_embed_tokens and drafter.config.own_lm_head
    if args.layout != "eagle4" and not own:
        if args.target is None:
            raise ValueError(
                f"--layout {args.layout} writes complete files, and this drafter borrows from its "
                "target; pass --target"
            )
        if target is None:
            target = load_target(on_cpu)[0]
        drafter.bind(target.get_input_embeddings(), target.get_output_embeddings())
    export(drafter, args.out, args.layout, verifier=args.target)
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
