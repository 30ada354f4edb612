"""Can catch: weights that depend on where a run was killed, a checkpoint or log that a kill cuts in
the middle, steps that a resumed run skips or counts twice."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from eagle4.training.curves import read_log
from eagle4.training.features import FeatureStore
from eagle4.training.trainer import Trainer
from tests.training.small import tiny_drafter, tiny_store, tiny_target
from tests.training.test_trainer import QUICK

ROOT = Path(__file__).resolve().parents[2]
CONFIG = dataclasses.replace(QUICK, steps=60, checkpoint_every=3, eval_every=20)
PROGRAM = "import sys; from tests.training.test_state import run; run(*sys.argv[1:])"


def run(folder, store_folder):
    trainer = Trainer(tiny_drafter(tiny_target()), FeatureStore(store_folder), folder, CONFIG)
    trainer.train()
    return trainer


def kill_a_run(folder, store_folder, rng):
    """Train in a process of its own that is killed at some moment after some step."""
    last, delay = rng.randrange(1, 45), rng.uniform(0, 0.03)
    print(f"kill {delay:.3f} s after step {last} was logged")
    shared = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    shared["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    command = [sys.executable, "-c", PROGRAM, str(folder), str(store_folder)]
    process = subprocess.Popen(command, env={**os.environ, **shared}, cwd=ROOT)
    log, limit = folder / "log.jsonl", time.monotonic() + 120
    while not (log.is_file() and log.read_bytes().count(b"\n") >= last):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    return process.wait()


def test_a_run_killed_at_a_random_moment_ends_bit_identical(tmp_path):
    """EAGLE4_TEST_SEED repeats a printed moment, as far as a clock can."""
    seed = int(os.environ.get("EAGLE4_TEST_SEED") or random.SystemRandom().randrange(1 << 20))
    print(f"EAGLE4_TEST_SEED={seed}")
    rng = random.Random(seed)
    store = tiny_store(tmp_path / "store", tiny_target())
    straight = run(tmp_path / "straight", store.folder)
    folder = tmp_path / "killed"
    assert kill_a_run(folder, store.folder, rng) == -signal.SIGKILL, "it ended before the kill"
    with open(folder / "log.jsonl", "ab") as file:
        file.write(b'{"step": 7, "lo')  # what a kill in the middle of a line leaves
    resumed = run(folder, store.folder)
    assert resumed.state.step == straight.state.step == CONFIG.steps
    for name, param in straight.params.items():
        assert torch.equal(param, resumed.params[name]), name
        assert torch.equal(straight.ema[name], resumed.ema[name]), name
    steps, evaluations = read_log(folder)
    assert [record["step"] for record in steps] == list(range(1, CONFIG.steps + 1))
    wanted = read_log(tmp_path / "straight")
    assert [r["loss"] for r in steps] == [r["loss"] for r in wanted[0]]
    assert [r["held_out"] for r in evaluations] == [r["held_out"] for r in wanted[1]]
