"""The `eagle4` command.

In: words from a terminal. Out: text on stdout, progress and complaints on stderr, an exit status:
0 done, 1 a check failed, 2 a mistake in the call (one line that says what to do) or a lost rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from ..parallel import RankError
from . import together
from .parser import build_parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s"
    )
    try:
        together.check_command(args.command)
        with together.only_first_speaks():
            return args.run(args) or 0
    except (ValueError, OSError, ImportError, RankError) as error:
        if args.verbose:
            raise
        if together.is_first_to_fail():
            print(f"eagle4 {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
