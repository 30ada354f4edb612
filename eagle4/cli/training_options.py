"""What can be typed about making drafters: `eagle4 data`, `eagle4 train` and `eagle4 convert`."""

from __future__ import annotations

from ..drafter.export import LAYOUTS
from . import data, train
from .options import add_command, length_option, model_options, target_option

_SETTINGS = {
    "--set": "TrainConfig, for example lr=0.001",
    "--drafter-set": "Eagle4Config, for example intermediate_size=3072",
    "--candidate-set": "CandidateConfig, for example init=both",
}


def data_command(commands) -> None:
    """Options of `eagle4 data`."""
    parser = add_command(
        commands,
        "data",
        data.data,
        "let the target answer prompts and store its features for training",
        "eagle4 data --prompts prompts.jsonl --synthesize 500 --out runs/data",
        "Answers are written by the target itself with continuous batching. An interrupted run "
        "continues where it stopped; manifest.json says what the folder holds. Under torchrun the "
        "processes split the target.",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    _prompt_sources(parser)
    _answering(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--tap-layers",
        type=int,
        nargs="+",
        metavar="N",
        help="target blocks whose outputs are stored (default: the rule of the public drafters)",
    )
    parser.add_argument(
        "--no-features",
        action="store_true",
        help="answers only, for `eagle4 train --online`: features of large targets fill disks",
    )
    length_option(parser, 512)
    model_options(parser, drafter=False)


def _prompt_sources(parser) -> None:
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="JSON lines: conversations (role/content or from/value), messages with tools, or "
        "input_ids with loss_mask",
    )
    parser.add_argument(
        "--keep-answers",
        action="store_true",
        help="learn the files' own answers (and prepared tokens) instead of regenerating them; "
        "only right when this target wrote them",
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
    parser.add_argument(
        "--starters",
        metavar="FILE",
        help="phrases that its user turns begin with, one per line (default: none)",
    )


def _answering(parser) -> None:
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 0.0, 0.0, 0.8],
        metavar="T",
        help="every answer's temperature is drawn from these; 0 is greedy (default: 0 0 0 0.8)",
    )
    parser.add_argument(
        "--max-repeated",
        type=int,
        default=32,
        metavar="N",
        help="end an answer that has only repeated itself for N tokens: loops are easy and "
        "teach little (0: never; default: 32)",
    )
    parser.add_argument("--batch-size", type=int, default=96, metavar="N", help="answers at a time")
    parser.add_argument(
        "--max-minutes",
        type=float,
        metavar="T",
        help="begin no more answers after T minutes and go on to the features",
    )
    parser.add_argument(
        "--drafter",
        metavar="MODEL",
        help="speculate with this drafter, one prompt at a time (pays where a full batch does not "
        "fill the device)",
    )


def train_command(commands) -> None:
    """Options of `eagle4 train`."""
    parser = add_command(
        commands,
        "train",
        train.train,
        "train a drafter on stored features",
        "eagle4 train --data runs/data --out runs/drafter --max-minutes 60",
        "Writes FOLDER/drafter and FOLDER/metrics.json. An interrupted run continues. Several "
        "processes share every step: torchrun --nproc-per-node 2 -m eagle4 train ...",
    )
    _run_options(parser)
    parser.add_argument("--device", help="cpu, cuda, ... (default: this process's GPU, or cpu)")
    target_option(parser)


def _run_options(parser) -> None:
    """What is trained on what, and what is done instead of training."""
    parser.add_argument(
        "--data", required=True, nargs="+", metavar="FOLDER", help="what `eagle4 data` wrote"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder of the run")
    parser.add_argument(
        "--init",
        metavar="MODEL",
        help="start from this drafter (EAGLE-3, 3.1 or EAGLE-4), mapped to the EAGLE-4 form; the "
        "optimiser is fresh, and a third of the usual lr is a good start",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps")
    parser.add_argument("--max-minutes", type=float, metavar="T", help="end the run by the clock")
    parser.add_argument("--seed", type=int, metavar="N")
    for option, what in _SETTINGS.items():
        parser.add_argument(
            option, action="append", default=[], metavar="KEY=VALUE", help=f"any field of {what}"
        )
    parser.add_argument(
        "--sweep",
        metavar="RANKS",
        help="do not train: fit candidate heads of these ranks (32,64,128) to the drafter of "
        "--init and print recall against measured cost",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print counts, memory and time of the run instead of making it",
    )
    parser.add_argument(
        "--online",
        action="store_true",
        help="compute features with the target whenever they are needed instead of reading them",
    )


def convert_command(commands) -> None:
    """Options of `eagle4 convert`."""
    parser = add_command(
        commands,
        "convert",
        train.convert,
        "rewrite an EAGLE-3, 3.1, EAGLE-4 or speculators drafter in another layout",
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
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="eagle4",
        help="eagle4 (default: this library's), eagle3 (SGLang, vLLM) or speculators; the latter "
        "two hold drafters of the EAGLE-3 form",
    )
    parser.add_argument("--dtype", default="auto", help="auto (default: as stored) or a dtype name")
