"""Commands as a launcher would start them on every rank."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any
from unittest import mock

import eagle4.cli.profile as profile
from eagle4.cli import main
from eagle4.parallel import Ranks


def run(ranks: Ranks, *lines: list[str]) -> list[dict[str, Any]]:
    """Exit status, text and complaints of every command line, as this rank sees them."""
    os.environ |= {"WORLD_SIZE": str(ranks.size), "RANK": str(ranks.rank)}
    grid = profile.COARSE._replace(repeats=1, verify_rows=(1, 4), contexts=(16, 64))
    found = []
    for line in lines:
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(profile, "COARSE", grid),
            mock.patch("eagle4.cli.together.is_first_to_fail", lambda: ranks.is_first),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            status = main(line)
        found.append({"status": status, "out": out.getvalue(), "err": err.getvalue()})
    return found
