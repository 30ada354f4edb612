"""What can be typed: subcommands, their options and one example each."""

from __future__ import annotations

import argparse

from . import measure, profile, run
from .options import (
    add_command,
    arms_option,
    length_option,
    model_options,
    prompt_options,
    sampling_options,
    speculation_options,
)
from .training_options import convert_command, data_command, train_command


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
    data_command(commands)
    train_command(commands)
    convert_command(commands)
    _profile(commands)
    _bench(commands)
    _check(commands)
    return parser


def _generate(commands) -> None:
    parser = add_command(
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
    parser = add_command(
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
    parser = add_command(
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
    parser = add_command(
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
    parser = add_command(
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
