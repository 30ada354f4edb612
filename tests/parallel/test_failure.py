"""Catches: ranks that wait for ever for one that died, went silent or failed alone; an error that
does not say what happened; more than one message."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import zoo
from scripted import small_drafter

from tests.parallel import unrest
from tests.parallel.world import end_of_world

TIMEOUT_S = 3.0


@pytest.mark.parametrize(
    ("how", "speculative"),
    [
        *(("killed", None), ("failed", None), ("caught", None)),
        *((how, {"harness": False}) for how in ("killed", "failed", "caught", "silent")),
    ],
)
def test_a_rank_that_is_gone_ends_the_others_in_time(how, speculative):
    limit_s = 8.0 if how == "silent" else 20.0  # of patience, with the start of four processes
    ended = end_of_world(4, unrest.death, how, speculative, timeout_s=TIMEOUT_S, limit_s=limit_s)
    for rank in (0, 2, 3):
        error = ended[rank].error or ""
        first_line = error.splitlines()[0]
        assert first_line.startswith(f"RankError: rank {rank} of 4 lost the other ranks")
        assert "died or did not answer in time" in first_line
        assert ended[rank].exit_code == 1 and ended[rank].seconds < 2 * TIMEOUT_S
    assert how != "failed" or "a bug on one rank" in (ended[1].error or "")
    assert how != "killed" or ended[1].exit_code == -signal.SIGKILL


@pytest.mark.slow
def test_the_command_ends_with_one_message(tmp_path):
    """Two processes of `python -m eagle4 generate` as a launcher starts them; one is killed."""
    import tiny

    target = zoo.build("llama", vocab_size=96)
    small_drafter(target).save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    tiny.tiny_tokenizer().save_pretrained(tmp_path / "target")
    words = ["generate", "--target", str(tmp_path / "target")]
    words += ["--drafter", str(tmp_path / "drafter"), "--dtype", "float32", "--device", "cpu"]
    words += ["--prompt", "w1 w2", "--max-new-tokens", "400", "--no-harness"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "eagle4", *words],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    assert processes[0].stdout is not None
    processes[0].stdout.read(1)  # it is generating
    processes[1].kill()
    start = time.monotonic()
    _, error = processes[0].communicate(timeout=60)
    processes[1].communicate()
    assert processes[0].returncode == 2 and time.monotonic() - start < 30
    assert error.count("lost the other ranks") == 1 and "Traceback" not in error
