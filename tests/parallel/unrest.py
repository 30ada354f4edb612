"""Ranks that see and measure different things, and ranks that die. Run by the tests beside it."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import torch
import zoo
from scripted import small_drafter
from transformers import LogitsProcessor, LogitsProcessorList

from eagle4 import Eagle4ForCausalLM
from eagle4.engine import home
from eagle4.harness.acceptance import Experience
from eagle4.harness.profile_file import write
from eagle4.parallel import Ranks
from profiling.world import FREE_DRAFTER
from tests.engine.compare import prompt
from tests.parallel.cases import DECODING, VOCAB

NOISE = 1e-6


def tied_pair() -> Eagle4ForCausalLM:
    """A pair in which every token has a twin with the same logit, held by another rank."""
    target = zoo.build("llama", vocab_size=VOCAB, num_hidden_layers=2)
    half = VOCAB // 2
    with torch.no_grad():
        target.lm_head.weight[half:] = target.lm_head.weight[:half]  # type: ignore
    drafter = small_drafter(target)
    with torch.no_grad():
        drafter.efficient_lm_head.weight[half:] = drafter.efficient_lm_head.weight[:half]
    return Eagle4ForCausalLM(target, drafter)


def disturb(model: Eagle4ForCausalLM, rank: int) -> None:
    """Noise of this rank alone in the target's and the drafter's logits, and moments of sleep."""
    generator, moments = torch.Generator().manual_seed(rank), random.Random(rank)

    def shake(module, args, output):
        if rank == 1 and moments.random() < 0.02:
            time.sleep(0.01)
        return output + NOISE * torch.randn(output.shape, generator=generator)

    assert model.drafter is not None
    for module in (model.target.lm_head, model.drafter.efficient_lm_head, model.drafter.norm):
        module.register_forward_hook(shake)


def write_costs(model: Eagle4ForCausalLM, rank: int) -> None:
    """A cost table of this rank alone, where generation finds it: it will be refined."""
    table = FREE_DRAFTER.table(fingerprint=home.fingerprint(model.adapter, model.drafter))
    factor = random.Random(rank)
    for surface in table.surfaces.values():
        surface.ns = [[ns * factor.uniform(0.7, 1.5) for ns in line] for line in surface.ns]
    path = home.profile_path(table.fingerprint)
    write(path, type(table)(table.surfaces, fingerprint=table.fingerprint), Experience())


def near_ties(ranks: Ranks, runs: int) -> dict[str, Any]:
    """Ids of many calls under noise, with costs of the rank's own and one slow rank."""
    model = tied_pair().shard(ranks)
    write_costs(model, ranks.rank)
    disturb(model, ranks.rank)
    ids, levels = [], 0
    for run in range(runs):
        mode = ("auto", "tree", "auto", "chain", "auto", "plain")[run % 6]
        sizes = {"harness": mode == "auto", "max_depth": 3, "top_k": 3, "max_nodes": 8}
        out = model.generate(
            **prompt([4 + run % 3, 3], seed=run, vocab=VOCAB),
            **DECODING[("greedy", "coupled")[run % 2]],
            max_new_tokens=6,
            speculative=None if mode == "plain" else {"mode": mode, **sizes},
            return_dict_in_generate=True,
        )
        ids.append(out.sequences.tolist())
        levels += out.speculation.draft_calls
    assert model.last_harness is not None
    table = model.last_harness.table
    surfaces = {kind: surface.ns for kind, surface in table.surfaces.items()}
    return {"ids": ids, "levels": levels, "factors": table.factors, "surfaces": surfaces}


class Jitter(LogitsProcessor):
    """A user's processor that answers differently on every rank."""

    def __init__(self, rank: int):
        self.generator = torch.Generator().manual_seed(rank)

    def __call__(self, input_ids, scores):
        return scores + torch.randn(scores.shape, generator=self.generator)


def disagreement(ranks: Ranks, is_agreed: bool) -> list:
    """Plain ids under such a processor; without the agreement the ranks part."""
    model = tied_pair().shard(ranks)
    if not is_agreed:
        ranks.broadcast = lambda value, purpose="agree": value  # type: ignore
    out = model.generate(
        **prompt([5], vocab=VOCAB),
        max_new_tokens=12,
        do_sample=False,
        speculative=None,
        logits_processor=LogitsProcessorList([Jitter(ranks.rank)]),
    )
    return out.tolist()


def own_clocks(ranks: Ranks) -> list:
    """Ids of calls that end by a clock, and of sampled calls without a seed."""
    model = tied_pair().shard(ranks)
    torch.manual_seed(ranks.rank)
    if ranks.rank:  # this rank's clock runs away
        time.time = lambda start=time.time: 100 * start()
    found = []
    for kwargs in ({"do_sample": True}, {"do_sample": False, "max_time": 0.5}):
        kwargs |= {"speculative": {"max_depth": 2, "max_nodes": 4}, "max_new_tokens": 30}
        found.append(model.generate(**prompt([5, 3], vocab=VOCAB), **kwargs).tolist())
    return found


def death(ranks: Ranks, how: str, speculative: Any = None) -> str:
    """Rank 1 goes in the middle of a generation; what the others raise."""
    model = tied_pair().shard(ranks)
    calls = 0

    def stop(module, args, output):
        nonlocal calls
        calls += 1
        if ranks.rank == 1 and calls == 12:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "silent":
                time.sleep(60)
            raise KeyError("a bug on one rank")

    model.target.model.norm.register_forward_hook(stop)
    model.generate(**prompt([5], vocab=VOCAB), max_new_tokens=60, do_sample=False, speculative=None)
    return "went on"
