"""`eagle4 bench` and `eagle4 check`: Markdown on stdout, then one line of JSON."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from ..evaluation.arbiter import Arbiter
from ..evaluation.arms import make_arms
from ..evaluation.benchmark import BenchConfig, cell_record, run_benchmark, summarise
from ..evaluation.lossless import check_lossless
from ..evaluation.prompts import BUILT_IN, Prompt, load_prompts
from ..evaluation.report import (
    benchmark_markdown,
    lossless_markdown,
    lossless_record,
    write_files,
)
from ..parallel.launch import launched_rank, launched_size
from .common import decoding, load_pair, setup_record, speculation


def bench(args: Namespace) -> int:
    """Paired speed measurement of the arms."""
    names = _arm_names(args)
    config = BenchConfig(
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        max_turns=args.turns,
        repeats=args.repeats,
        warmup=args.warmup,
        reference="plain" if "plain" in names else names[0],
    )
    prompts = _prompts(args)
    loaded = load_pair(args)
    arms = make_arms(loaded.model, loaded.target, names, speculation(args), decoding(args))
    # The machine's load is part of the setup: describe it before this process adds its own.
    result = setup_record(args, loaded)
    result["setup"] |= {"repeats": args.repeats, "warmup": args.warmup}
    bar = partial(tqdm, desc="bench", mininterval=5)
    cells = run_benchmark(arms, prompts, loaded.tokenizer, config, loaded.device, bar)
    summary = summarise(cells)
    if args.explain:
        harness = loaded.model.last_harness
        decode = loaded.tokenizer.decode
        print(
            "no round was decided by the harness"
            if harness is None
            else harness.report.explain(decode),
            end="\n\n",
        )
    result |= {"summary": summary, "cells": [cell_record(cell) for cell in cells]}
    return _publish(args, result, benchmark_markdown(result), {"arms": summary["all"]})


def check(args: Namespace) -> int:
    """Token-for-token comparison of the arms; status 1 unless every difference is a near tie."""
    names, settings = _arm_names(args), decoding(args)
    if settings["do_sample"] and set(names) - {"plain", "eagle4", "chain"}:
        raise ValueError(
            "sampled arms give the same tokens only under the engine's shared noise: pass --arms "
            "plain,eagle4 (and chain)"
        )
    prompts = _prompts(args)
    loaded = load_pair(args)
    result = setup_record(args, loaded)
    report = check_lossless(
        make_arms(loaded.model, loaded.target, names, speculation(args), settings),
        prompts,
        loaded.tokenizer,
        None if settings["do_sample"] else Arbiter(loaded.target),
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        max_turns=args.turns,
        device=loaded.device,
        progress=partial(tqdm, desc="check", mininterval=5),
    )
    result |= lossless_record(report)
    keys = ("ok", "tokens", "pairs", "near_ties", "unexplained", "idle_arms")
    line = {key: result[key] for key in keys}
    _publish(args, result, lossless_markdown(result, report), line)
    ranks = loaded.model.ranks
    # Each rank has computed its own bounds; all end with the status of the first.
    is_ok = report.is_ok if ranks is None else ranks.first([report.is_ok])[0]
    return 0 if is_ok else 1


def _arm_names(args: Namespace) -> list[str]:
    is_split = launched_size() > 1
    usual = "plain,eagle4" if is_split else "transformers,plain,eagle4"
    given = usual if args.arms is None else args.arms
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise ValueError("--arms names no arm")
    if is_split and "transformers" in names:
        raise ValueError(
            "under torchrun there is no transformers arm: its ranks would not agree on tokens; "
            f"leave it out (--arms {usual})"
        )
    return names


def _prompts(args: Namespace) -> list[Prompt]:
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    if args.prompts is None:
        return list(BUILT_IN[: args.limit])
    return load_prompts(args.prompts, args.limit)


def _publish(
    args: Namespace, result: Mapping[str, Any], markdown: str, line: Mapping[str, Any]
) -> int:
    print(markdown)
    is_writer = args.out and launched_rank() == 0
    files = write_files(args.out, result, markdown) if is_writer else []
    environment = result["environment"]
    facts = {name: environment[name] for name in ("hardware", "commit", "date")}
    record = {"command": args.command, **line, **facts, "files": [str(path) for path in files]}
    print(json.dumps(record))
    return 0
