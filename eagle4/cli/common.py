"""What several subcommands do: load models, read the speculation options, describe the setup."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import demo
from ..config import SpeculativeConfig
from ..evaluation.environment import describe_environment, describe_model
from ..modeling import Eagle4ForCausalLM
from ..parallel.launch import launched_size

DEMO = "smollm2"


class Loaded(NamedTuple):
    """The parts that a command works with."""

    model: Any  # Eagle4ForCausalLM
    target: Any  # the bare Transformers model inside it
    tokenizer: Any
    device: torch.device


def load_target(args: Namespace) -> tuple[Any, Any, torch.device]:
    """``(target, tokenizer, device)`` from ``--target``, ``--dtype`` and ``--device``."""
    device, dtype = _place(args)
    if args.target == DEMO:
        target, tokenizer = demo.smollm2(dtype=dtype, device=device)
        return target, tokenizer, device
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype)
    return target.to(device).eval(), tokenizer, device


def _place(args: Namespace) -> tuple[torch.device, Any]:
    """The device and the dtype that were asked for, or are best there."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype: Any = args.dtype
    if dtype != "auto" or device.type == "cpu" or args.target == DEMO:
        dtype = demo.resolve_dtype(dtype, device)
    return device, dtype


def load_pair(args: Namespace) -> Loaded:
    """Target and drafter, attached. Raises `ValueError` when no drafter was named."""
    return load_model(args, drafter_source(args))


def load_model(args: Namespace, drafter: str | None) -> Loaded:
    """The target and, unless it is None, a drafter; under `torchrun` this process's share."""
    options: dict[str, Any] = {n: getattr(args, n, "auto") for n in ("compile", "launch")}
    if launched_size() > 1:
        return _load_share(args, drafter, options)
    target, tokenizer, device = load_target(args)
    model: Any = Eagle4ForCausalLM.from_pretrained(target, drafter, tokenizer=tokenizer, **options)
    return Loaded(model, target, tokenizer, device)


def _load_share(args: Namespace, drafter: str | None, options: dict[str, Any]) -> Loaded:
    """The demo's target is one file for all; of others no more than the share is read."""
    (device, dtype), target = _place(args), args.target
    if target == DEMO:
        target, tokenizer = demo.smollm2(dtype=dtype)
    else:
        tokenizer = AutoTokenizer.from_pretrained(target)
    options |= {"tokenizer": tokenizer, "tp_size": launched_size(), "device": device.type}
    model: Any = Eagle4ForCausalLM.from_pretrained(target, drafter, dtype=dtype, **options)
    return Loaded(model, model.target, tokenizer, model.ranks.device)


def drafter_source(args: Namespace) -> str:
    """``--drafter``, or the shipped one for the demo target."""
    if args.drafter in (None, DEMO):
        if args.drafter is None and args.target != DEMO:
            raise ValueError(
                f"no drafter for {args.target}: pass --drafter FOLDER (train one with "
                "`eagle4 data` and `eagle4 train`)"
            )
        return str(demo.drafter_path())
    return args.drafter


def speculation(args: Namespace) -> SpeculativeConfig:
    """The options that were given, on top of the defaults."""
    names = ("mode", "max_depth", "top_k", "max_nodes", "harness", "profile", "sampling")
    given = {name: getattr(args, name, None) for name in names}
    return SpeculativeConfig(**{name: value for name, value in given.items() if value is not None})


def decoding(args: Namespace) -> dict[str, Any]:
    """Greedy, or sampling when a sampling option was given: arguments of `generate`."""
    names = ("temperature", "top_p", "seed")
    given = {name: getattr(args, name, None) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": bool(given), **given}


def setup_record(args: Namespace, loaded: Loaded) -> dict[str, Any]:
    """Setup and environment of a measurement, for JSON and Markdown."""
    target = describe_model(loaded.target)
    drafter = describe_model(loaded.model.drafter)
    ranks = loaded.model.ranks
    together = {}
    if ranks is not None:
        together["ranks"] = f"{ranks.size}, sums by {ranks.sums} (sizes are those of one share)"
    return {
        "setup": {
            "target": f"{target['name']} ({target['class']}, {target['parameters'] / 1e6:.1f} M)",
            "drafter": f"{Path(drafter_source(args)).name} ({drafter['parameters'] / 1e6:.1f} M)",
            "dtype": target["dtype"],
            "device": target["device"],
            "speculation": str(speculation(args)),
            "compile": "on" if loaded.model.graphs().compiled else "off",
            "launch": "direct" if loaded.model.graphs().replays is None else "graphs",
            "prompts": Path(args.prompts).name if args.prompts else "built-in",
            "batch_size": args.batch_size,
            "turns": args.turns,
            "max_new_tokens": args.max_new_tokens,
            "decoding": _describe(decoding(args)),
            **together,
        },
        "environment": describe_environment(),
    }


def _describe(settings: dict[str, Any]) -> str:
    given = [f"{name} {value}" for name, value in settings.items() if name != "do_sample"]
    return ", ".join(["sampling", *given]) if settings["do_sample"] else "greedy"
