"""Worlds of gloo processes for tests: `run_world(size, function, *args)`.

All processes fork from one server that has imported everything once. Every process calls
``function(ranks, *args)``; the results come back in rank order.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    f"tests.parallel.{name}"
    for name in ("cases", "fused", "one_shot", "pieces", "shares", "unrest")
]


class Ended(NamedTuple):
    """How a rank ended: what it returned or the error's text, and its exit code."""

    value: Any
    error: str | None
    exit_code: int | None
    seconds: float


def run_world(
    size: int, function: Callable, *args: Any, timeout_s: float = 60.0, limit_s: float = 300.0
) -> list[Any]:
    """Results of all ranks; raises when one of them failed."""
    ended = end_of_world(size, function, *args, timeout_s=timeout_s, limit_s=limit_s)
    failed = [f"rank {rank}: {end.error}" for rank, end in enumerate(ended) if end.error]
    if failed:
        raise AssertionError("\n".join(failed))
    return [end.value for end in ended]


def end_of_world(
    size: int,
    function: Callable,
    *args: Any,
    timeout_s: float = 60.0,
    limit_s: float = 300.0,
) -> list[Ended]:
    """How every rank ended; ``timeout_s`` is the group's, ``limit_s`` the test's patience."""
    _start_server()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _CONTEXT.Process(
                target=_rank, args=(rank, size, store, timeout_s, pipes[rank][1], function, args)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return [
                _end(process, receiver, start, limit_s)
                for process, (receiver, _) in zip(processes, pipes, strict=True)
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()


@functools.cache
def _start_server() -> None:
    """One process that has imported everything; it finds modules where this one does."""
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    # Importing takes its time, which must not count for the first test.
    first = _CONTEXT.Process(target=time.time)
    first.start()
    first.join()


def _end(process, receiver, start: float, limit_s: float) -> Ended:
    left = max(0.0, start + limit_s - time.monotonic())
    value, error, seconds = None, None, limit_s
    try:
        if receiver.poll(left):
            value, error, seconds = receiver.recv()
        else:
            error = f"still running after {limit_s:.0f} s"
    except EOFError:
        error = "died without a word"
    process.join(max(1.0, start + limit_s - time.monotonic()))
    return Ended(value, error, process.exitcode, seconds)


def _rank(rank, size, store, timeout_s, sender, function, args) -> None:
    import torch
    import torch.distributed as dist

    from eagle4.parallel.launch import join

    torch.set_num_threads(1)
    os.environ["EAGLE4_PROFILES"] = str(Path(store).parent / f"profiles-{rank}")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    start = time.monotonic()
    try:
        value, error = function(join(size, "cpu"), *args), None
        dist.barrier()
    except BaseException as problem:
        value, error = None, f"{type(problem).__name__}: {problem}\n{traceback.format_exc()}"
    sender.send((value, error, time.monotonic() - start))
    sender.close()
    # Without the farewell of the group, for which a dead rank would have to answer.
    os._exit(0 if error is None else 1)
