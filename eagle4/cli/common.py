"""What several subcommands do: load models, read the speculation options, describe the setup."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .. import demo
from ..config import SpeculativeConfig
from ..evaluation.environment import describe_environment, describe_model
from ..modeling import Eagle4ForCausalLM
from ..parallel.launch import launched_size
from ..parallel.plan import check_size

DEMO = "smollm2"


class Loaded(NamedTuple):
    """The parts that a command works with."""

    model: Any  # Eagle4ForCausalLM
    target: Any  # the bare Transformers model inside it
    tokenizer: Any
    device: torch.device


def load_target(args: Namespace, is_whole: bool = False) -> tuple[Any, Any, torch.device]:
    """``(target, tokenizer, device)`` from ``--target``, ``--dtype`` and ``--device``.

    Under `torchrun` the target stays on the CPU until every process has taken its share, unless
    ``is_whole``: then every process keeps all of it.
    """
    tp_size = 1 if is_whole else launched_size()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    place = torch.device("cpu") if tp_size > 1 else device
    dtype: Any = args.dtype
    if dtype != "auto" or device.type == "cpu" or args.target == DEMO:
        dtype = demo.resolve_dtype(dtype, device)
    if args.target == DEMO:
        target, tokenizer = demo.smollm2(dtype=dtype, device=place)
        return target, tokenizer, device
    if tp_size > 1:
        check_size(AutoConfig.from_pretrained(args.target), tp_size)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype)
    return target.to(place).eval(), tokenizer, device


def load_pair(args: Namespace) -> Loaded:
    """Target and drafter, attached. Raises `ValueError` when no drafter was named."""
    drafter = drafter_source(args)
    target, tokenizer, device = load_target(args)
    tp_size = launched_size()
    where = {} if tp_size == 1 else {"tp_size": tp_size, "device": device.type}
    options = {"tokenizer": tokenizer, "compile": getattr(args, "compile", "auto"), **where}
    model: Any = Eagle4ForCausalLM.from_pretrained(target, drafter, **options)
    return Loaded(model, target, tokenizer, device if model.ranks is None else model.ranks.device)


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
    return {
        "setup": {
            "target": f"{target['name']} ({target['class']}, {target['parameters'] / 1e6:.1f} M)",
            "drafter": f"{Path(drafter_source(args)).name} ({drafter['parameters'] / 1e6:.1f} M)",
            "dtype": target["dtype"],
            "device": target["device"],
            "speculation": str(speculation(args)),
            "compile": "on" if loaded.model.graphs().compiled else "off",
            "prompts": Path(args.prompts).name if args.prompts else "built-in",
            "batch_size": args.batch_size,
            "turns": args.turns,
            "max_new_tokens": args.max_new_tokens,
            "decoding": _describe(decoding(args)),
        },
        "environment": describe_environment(),
    }


def _describe(settings: dict[str, Any]) -> str:
    given = [f"{name} {value}" for name, value in settings.items() if name != "do_sample"]
    return ", ".join(["sampling", *given]) if settings["do_sample"] else "greedy"
