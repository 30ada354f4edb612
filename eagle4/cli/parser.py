"""What can be typed: subcommands, their options and one example each."""

from __future__ import annotations

import argparse

from . import measure, profile, run, train
from .options import (
    arms_option,
    length_option,
    model_options,
    prompt_options,
    sampling_options,
    speculation_options,
    target_option,
)

RAW = argparse.RawDescriptionHelpFormatter


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Each subparser carries its handler in ``run``."""
    parser = argparse.ArgumentParser(
        prog="eagle4",
        description="Speculative decoding with EAGLE-4 drafters: same output, fewer target calls.",
        epilog="`eagle4 COMMAND --help` explains a command and shows an example.",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log more, and show tracebacks of errors"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _generate(commands)
    _chat(commands)
    _data(commands)
    _train(commands)
    _convert(commands)
    _profile(commands)
    _bench(commands)
    _check(commands)
    return parser


def _add(commands, name: str, handler, summary: str, example: str, more: str = ""):
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {more}".strip(),
        epilog=f"example:\n  {example}",
        formatter_class=RAW,
    )
    parser.set_defaults(run=handler)
    return parser


def _generate(commands) -> None:
    parser = _add(
        commands,
        "generate",
        run.generate,
        "answer one prompt and print statistics",
        'eagle4 generate --prompt "Why is the sky blue?"',
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the user's message")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--plain", action="store_true", help="decode without speculation")
    length_option(parser, 256)
    model_options(parser)
    speculation_options(parser)
    sampling_options(parser)


def _chat(commands) -> None:
    parser = _add(
        commands,
        "chat",
        run.chat,
        "talk to the target",
        "eagle4 chat",
        "An empty line or Ctrl-D ends the conversation.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--plain", action="store_true", help="decode without speculation")
    length_option(parser, 512)
    model_options(parser)
    speculation_options(parser)
    sampling_options(parser)


def _profile(commands) -> None:
    parser = _add(
        commands,
        "profile",
        profile.profile,
        "measure what drafting and verifying cost on this machine",
        "eagle4 profile --plot costs.png",
        "The table goes to eagle4's cache folder, where generation finds it, or to --out. Without "
        "it the first long request measures a coarse one.",
    )
    parser.add_argument("--out", metavar="FILE", help="write the table there instead")
    parser.add_argument("--plot", metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument("--coarse", action="store_true", help="a few seconds instead of minutes")
    model_options(parser)


def _bench(commands) -> None:
    parser = _add(
        commands,
        "bench",
        measure.bench,
        "measure speed and accept length against plain decoding",
        "eagle4 bench --prompts mt_bench.jsonl --out results/mt_bench",
        "All arms answer every prompt in one process, interleaved in rotating order. The last line "
        "on stdout is one JSON object.",
    )
    arms_option(parser)
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="runs per prompt and arm"
    )
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="batches to run first and forget"
    )
    parser.add_argument(
        "--explain", action="store_true", help="show the last round's tree and decisions"
    )
    length_option(parser, 128)
    prompt_options(parser)
    model_options(parser)
    speculation_options(parser)
    sampling_options(parser)


def _check(commands) -> None:
    parser = _add(
        commands,
        "check",
        measure.check,
        "prove that speculation does not change the output",
        "eagle4 check --prompts mt_bench.jsonl --dtype float32 --max-new-tokens 128",
        "Compares with plain decoding and with Transformers' generate, token for token. Every "
        "difference is arbitrated in fp32. Exit status 1 if one is not a near tie.",
    )
    arms_option(parser)
    length_option(parser, 128)
    prompt_options(parser)
    model_options(parser)
    speculation_options(parser)
    sampling_options(parser)


def _data(commands) -> None:
    parser = _add(
        commands,
        "data",
        train.data,
        "let the target answer prompts and store its features for training",
        "eagle4 data --prompts prompts.jsonl --synthesize 500 --out runs/data",
        "An interrupted run continues where it stopped.",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="JSON lines with conversations or messages; only the user's part is used",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N prompts of the files"
    )
    parser.add_argument(
        "--synthesize",
        type=int,
        default=0,
        metavar="N",
        help="also let the target write N user turns itself",
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="answers at a time")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--tap-layers",
        type=int,
        nargs="+",
        metavar="N",
        help="target blocks whose outputs are stored (default: the rule of the public drafters)",
    )
    length_option(parser, 512)
    model_options(parser, drafter=False)


def _train(commands) -> None:
    parser = _add(
        commands,
        "train",
        train.train,
        "train a drafter on stored features",
        "eagle4 train --data runs/data --out runs/drafter --max-minutes 60",
        "Writes FOLDER/drafter and FOLDER/metrics.json. An interrupted run continues.",
    )
    parser.add_argument("--data", required=True, metavar="FOLDER", help="what `eagle4 data` wrote")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder of the run")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps")
    parser.add_argument("--max-minutes", type=float, metavar="T", help="end the run by the clock")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other field of TrainConfig, for example lr=0.001",
    )
    parser.add_argument(
        "--drafter-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any field of Eagle4Config, for example intermediate_size=3072",
    )
    target_option(parser)
    parser.set_defaults(device="cpu")


def _convert(commands) -> None:
    parser = _add(
        commands,
        "convert",
        train.convert,
        "rewrite an EAGLE-3, 3.1 or EAGLE-4 drafter in this library's layout",
        "eagle4 convert --drafter path/to/eagle3 --target path/to/target --out my-drafter",
        "Only safetensors files are read.",
    )
    parser.add_argument("--drafter", required=True, metavar="MODEL", help="hub id or folder")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="hub id or folder of the target, for drafters that do not say how deep it is",
    )
    parser.add_argument(
        "--tap-convention",
        choices=("post_block", "hidden_states"),
        help="what the layer ids in the file mean, where the file leaves it open",
    )
    parser.add_argument(
        "--norm-output-means",
        choices=("state", "head"),
        help="what norm_output in the file means, where the file leaves it open",
    )
    parser.add_argument("--dtype", default="auto", help="auto (default: as stored) or a dtype name")
