"""Several processes under `torchrun` that run one command: which commands may, and who speaks.

All but `train` split the target between them; `train` shares out the steps, each process with a
whole target.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
import transformers

from ..parallel.launch import launched_rank, launched_size

COMMANDS = ("generate", "profile", "bench", "check", "data", "train")
PATIENCE = timedelta(seconds=5)  # with the store that decides who reports an error


def check_command(command: str) -> None:
    """Raise `ValueError` for a command that several processes cannot share."""
    if launched_size() > 1 and command not in COMMANDS:
        raise ValueError(
            f"`eagle4 {command}` runs in one process; torchrun is for {', '.join(COMMANDS)}"
        )


@contextlib.contextmanager
def only_first_speaks() -> Iterator[None]:
    """Inside, ranks but the first write to nowhere and log nothing but what ends them."""
    if launched_rank() == 0:
        yield
        return
    logging.getLogger().setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity(logging.CRITICAL)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def is_first_to_fail() -> bool:
    """Whether this process reports the error that ends them all; true for exactly one of them."""
    if launched_size() == 1:
        return True
    place = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "0"))
    try:
        # The store would complain at length if nobody were there.
        socket.create_connection(place, PATIENCE.total_seconds()).close()
        store = dist.TCPStore(*place, is_master=False, timeout=PATIENCE)  # type: ignore
        return store.add("eagle4/failed", 1) == 1
    except (OSError, RuntimeError):
        # The store died with rank 0, which can say nothing any more.
        return launched_rank() == 1
