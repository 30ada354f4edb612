"""Groups of options that several subcommands share."""

from __future__ import annotations

import argparse
from typing import get_args

from ..engine.graphs import CompileMode
from ..engine.launch import LaunchMode
from ..evaluation.arms import ARM_NAMES


def add_command(commands, name: str, handler, summary: str, example: str, more: str = ""):
    """A subparser that carries its handler in ``run`` and shows an example."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {more}".strip(),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=handler)
    return parser


def target_option(parser) -> None:
    """Which model is sped up."""
    parser.add_argument(
        "--target",
        default="smollm2",
        metavar="MODEL",
        help="hub id or folder of the target, or smollm2 for the demo model (default)",
    )


def arms_option(parser: argparse.ArgumentParser) -> None:
    """Which ways of answering are compared."""
    parser.add_argument(
        "--arms",
        metavar="LIST",
        help=f"comma-separated, of {', '.join(ARM_NAMES)} (default: the first three; under "
        "torchrun plain,eagle4)",
    )


def model_options(parser: argparse.ArgumentParser, drafter: bool = True) -> None:
    """Target, drafter, precision and device."""
    group = parser.add_argument_group("models")
    target_option(group)
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
    if drafter:
        group.add_argument(
            "--compile",
            choices=get_args(CompileMode),
            default="auto",
            help="torch.compile the rounds: auto (default: on accelerators), on or off",
        )
        group.add_argument(
            "--launch",
            choices=get_args(LaunchMode),
            default="auto",
            help="how rounds reach a GPU: direct (also auto, the default), or graphs: recorded "
            "CUDA graphs",
        )


def sampling_options(parser: argparse.ArgumentParser) -> None:
    """Sampling instead of greedy decoding."""
    group = parser.add_argument_group("sampling (default: greedy decoding)")
    group.add_argument("--temperature", type=float, metavar="T", help="sample at this temperature")
    group.add_argument("--top-p", type=float, metavar="P", help="from the likeliest tokens")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same text")
    group.add_argument(
        "--sampling",
        choices=("coupled", "rejection"),
        help="how drafts meet the target's law: coupled (default) gives the text of plain "
        "sampling with the same seed",
    )


def speculation_options(parser: argparse.ArgumentParser) -> None:
    """Fields of `SpeculativeConfig`."""
    group = parser.add_argument_group("speculation (the defaults are meant to be kept)")
    group.add_argument("--mode", choices=("auto", "tree", "chain"), help="shape of the drafts")
    group.add_argument(
        "--max-depth", type=int, metavar="N", help="drafted tokens on a path at most"
    )
    group.add_argument("--top-k", type=int, metavar="N", help="children per drafted token")
    group.add_argument("--max-nodes", type=int, metavar="N", help="drafted tokens per verification")
    group.add_argument(
        "--no-harness",
        dest="harness",
        action="store_false",
        default=None,
        help="always draft and verify as much as the limits above allow",
    )
    group.add_argument(
        "--profile", metavar="FILE", help="costs from this file of `eagle4 profile`, unrefined"
    )


def length_option(parser: argparse.ArgumentParser, default: int) -> None:
    """How long an answer may get."""
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=default,
        metavar="N",
        help=f"length of an answer at most (default {default})",
    )


def prompt_options(parser: argparse.ArgumentParser) -> None:
    """What is asked, how many at a time, and where the result goes."""
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
