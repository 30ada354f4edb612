"""What the ranks of a test's world run, and the same on one process. Imported by every rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import zoo
from scripted import ScriptedModel, small_drafter
from transformers import PreTrainedModel

from eagle4 import Eagle4ForCausalLM
from eagle4.engine import home
from eagle4.harness.acceptance import Experience
from eagle4.harness.profile_file import write
from eagle4.parallel import Ranks
from profiling.world import CPU
from tests.engine.compare import prompt

VOCAB = 24
FAMILIES = ("llama", "qwen3", "qwen3_moe")
MODES = ("tree", "chain", "auto", "plain")
SIZES = {"max_depth": 3, "top_k": 3, "max_nodes": 8}
PROMPTS = {1: [6], 4: [7, 2, 5, 3]}
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "seed": 7, "top_k": 0},
}


def build(family: str, **overrides: Any) -> Eagle4ForCausalLM:
    """A tiny pair, the same in every process."""
    target = zoo.build(family, vocab_size=VOCAB, num_hidden_layers=2, **overrides)
    return Eagle4ForCausalLM(target, small_drafter(target))


def speculation(model: Eagle4ForCausalLM, mode: str, folder: str = "/tmp") -> dict | None:
    """``speculative=`` of a mode; ``auto`` asks the harness, with a cost table of a CPU."""
    if mode == "plain":
        return None
    if mode != "auto":
        return {"mode": mode, "harness": False, **SIZES}
    rank = 0 if model.ranks is None else model.ranks.rank
    path = f"{folder}/profile-{rank}.json"
    here = home.fingerprint(model.adapter, model.drafter)
    write(home.Path(path), CPU.table(fingerprint=here), Experience())
    return {"profile": path, **SIZES}


def answers(ranks: Ranks | None, family: str, folder: str) -> dict[tuple, list]:
    """Ids of every mode, batch and decoding."""
    model = build(family)
    if ranks is not None:
        model.shard(ranks)
    found = {}
    for mode, batch, decoding in itertools.product(MODES, PROMPTS, DECODING):
        out = model.generate(
            **prompt(PROMPTS[batch], vocab=VOCAB),
            **DECODING[decoding],
            max_new_tokens=10,
            speculative=speculation(model, mode, folder),
            return_dict_in_generate=True,
        )
        assert not out.speculation.fallbacks, out.speculation.fallbacks
        found[mode, batch, decoding] = out.sequences.tolist()
    return found
