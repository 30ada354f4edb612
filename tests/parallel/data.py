"""Training data from a split target, as ranks and as one process make it. Run by `test_data`."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import tiny

from eagle4 import Eagle4ForCausalLM
from eagle4.cli import data as command
from eagle4.cli.common import Loaded
from eagle4.cli.parser import build_parser
from eagle4.engine.continuous import Job, Sampling, answer_all
from eagle4.parallel import Ranks, shard_target
from eagle4.target import TargetAdapter
from tests.parallel import commands

VOCAB = 600
ENDS = list(range(100, 160))
LAWS = {
    "greedy": Sampling(),
    "coupled": Sampling(0.8),
    "top_k": Sampling(1.0, top_k=256, top_p=0.95),
    "top_p": Sampling(1.2, top_p=0.9),
    "all": Sampling(1.0, top_k=1000),
}


def target() -> Any:
    """A tiny target whose answers end early and late."""
    return tiny.tiny_llama(VOCAB, layers=2, eos_token_id=ENDS)


def answers(ranks: Ranks | None, names: list[str]) -> dict[str, Any]:
    """Answers of jobs of several laws in one batch, and what was exchanged to draw tokens.

    Ranks but the first are given no jobs and other sizes.
    """
    adapter = TargetAdapter(target())
    laws = [LAWS[name] for name in names]
    jobs = [Job(str(i), list(range(200, 203 + i)), 24, laws[i % len(laws)], i) for i in range(13)]
    sizes = {"num_rows": 5, "capacity": 48}
    if ranks is not None:
        adapter.share(shard_target(adapter.model, ranks))
        ranks.sent_bytes.clear()
        if not ranks.is_first:
            jobs, sizes = [], {"num_rows": 1, "capacity": 2}
    found = {job.id: answer for job, answer in answer_all(adapter, jobs, ends=ENDS, **sizes)}
    return {"answers": found, "sent": ranks and dict(ranks.sent_bytes)}


def run(ranks: Ranks, *lines: list[str]) -> list[dict[str, Any]]:
    """`eagle4` with "@" for this rank's number. Clocks but the first rank's run away."""
    if ranks.rank:
        time.monotonic = lambda start=time.monotonic: 1e9 + start()
    return commands.run(ranks, *[[word.replace("@", str(ranks.rank)) for word in x] for x in lines])


def fail(ranks: Ranks, who: int, line: list[str]) -> str:
    """One rank has a bug in the middle of its answers; what the others raise."""
    model = Eagle4ForCausalLM(target()).shard(ranks)
    calls = 0

    def stop(module, inputs, output):
        nonlocal calls
        calls += 1
        if ranks.rank == who and calls == 30:
            raise KeyError("a bug on one rank")

    model.target.model.norm.register_forward_hook(stop)
    loaded = Loaded(model, model.target, tiny.tiny_tokenizer(VOCAB), ranks.device)
    with mock.patch.object(command, "load_model", return_value=loaded):
        command.data(build_parser().parse_args(line))
    return "went on"
