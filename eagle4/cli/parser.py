"""What can be typed: subcommands, their options and one example each."""

from __future__ import annotations

import argparse

from ..evaluation.arms import ARM_NAMES
from . import measure, run, train

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
    _convert(commands)
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


def _model_options(parser: argparse.ArgumentParser, drafter: bool = True) -> None:
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        default="smollm2",
        metavar="MODEL",
        help="hub id or folder of the target, or smollm2 for the demo model (default)",
    )
    if drafter:
        group.add_argument(
            "--drafter",
            metavar="MODEL",
            help="hub id or folder of the drafter; default with the smollm2 target: the one that "
            "ships with the repository",
        )
    group.add_argument(
        "--dtype",
        default="auto",
        help="auto (default: what is fast on this device), bfloat16, float16 or float32",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")


def _speculation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation (the defaults are meant to be kept)")
    group.add_argument("--mode", choices=("auto", "tree", "chain"), help="shape of the drafts")
    group.add_argument(
        "--max-depth", type=int, metavar="N", help="drafted tokens on a path at most"
    )
    group.add_argument("--top-k", type=int, metavar="N", help="children per drafted token")
    group.add_argument("--max-nodes", type=int, metavar="N", help="drafted tokens per verification")


def _length_option(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=default,
        metavar="N",
        help=f"length of an answer at most (default {default})",
    )


def _prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines with turns, conversations, messages or prompt; or .txt with one prompt "
        "per line (default: four built-in prompts)",
    )
    group.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    group.add_argument(
        "--turns", type=int, default=1, metavar="N", help="turns per conversation (default 1)"
    )
    group.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts per call")
    group.add_argument(
        "--out", metavar="PREFIX", help="write PREFIX.json and PREFIX.md (default: print only)"
    )


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
    _length_option(parser, 256)
    _model_options(parser)
    _speculation_options(parser)


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
    _length_option(parser, 512)
    _model_options(parser)
    _speculation_options(parser)


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
    parser.add_argument(
        "--arms",
        default="transformers,plain,eagle4",
        metavar="LIST",
        help=f"comma-separated, of {', '.join(ARM_NAMES)} (default: the first three)",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="runs per prompt and arm"
    )
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="batches to run first and forget"
    )
    _length_option(parser, 128)
    _prompt_options(parser)
    _model_options(parser)
    _speculation_options(parser)


def _check(commands) -> None:
    parser = _add(
        commands,
        "check",
        measure.check,
        "prove that speculation does not change greedy output",
        "eagle4 check --prompts mt_bench.jsonl --dtype float32 --max-new-tokens 128",
        "Compares with plain decoding and with Transformers' generate, token for token. Every "
        "difference is arbitrated in fp32. Exit status 1 if one is not a near tie.",
    )
    parser.add_argument(
        "--arms",
        default="transformers,plain,eagle4",
        metavar="LIST",
        help=f"comma-separated, of {', '.join(ARM_NAMES)} (default: the first three)",
    )
    _length_option(parser, 128)
    _prompt_options(parser)
    _model_options(parser)
    _speculation_options(parser)


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
