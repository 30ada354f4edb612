"""What the ranks of a test's world run, and the same on one process. Imported by every rank."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import torch
import zoo
from scripted import Mixed, ScriptedModel, continuations, small_drafter
from transformers.generation.streamers import BaseStreamer

from eagle4 import Eagle4ForCausalLM
from eagle4.engine import home
from eagle4.engine.graphs import Graphs, num_compiled
from eagle4.harness.acceptance import Experience
from eagle4.harness.profile_file import write
from eagle4.parallel import Ranks
from profiling.world import CPU
from tests.engine.compare import prompt

VOCAB = 24
FAMILIES = ("llama", "qwen3", "qwen3_moe")
MODES = ("tree", "chain", "auto", "device", "plain")
SIZES = {"max_depth": 3, "top_k": 3, "max_nodes": 8}
PROMPTS = {1: [6], 4: [7, 2, 5, 3]}
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "seed": 7, "top_k": 0},
}


def build(family: str, **overrides: Any) -> Eagle4ForCausalLM:
    """A tiny pair, the same in every process."""
    if family == "qwen3":
        overrides["layer_types"] = ["sliding_attention", "full_attention"]
    target = zoo.build(family, vocab_size=VOCAB, num_hidden_layers=2, **overrides)
    return Eagle4ForCausalLM(target, small_drafter(target))


def speculation(model: Eagle4ForCausalLM, mode: str, folder: str = "/tmp") -> dict | None:
    """``speculative=`` of a mode; ``auto`` asks the harness, with a cost table of a CPU.

    ``device`` is ``auto`` with decisions in tensor code.
    """
    if mode == "plain":
        return None
    if mode not in ("auto", "device"):
        return {"mode": mode, "harness": False, **SIZES}
    rank = 0 if model.ranks is None else model.ranks.rank
    path = f"{folder}/profile-{rank}.json"
    here = home.fingerprint(model.adapter, model.drafter, model.graphs())
    write(home.Path(path), CPU.table(fingerprint=here), Experience())
    return {"profile": path, **SIZES}


def wanted(is_full: bool) -> list[tuple[str, str, int, str]]:
    """Cases as (family, mode, batch, decoding): all of them, or each thing at least once."""
    every = list(itertools.product(FAMILIES, MODES, PROMPTS, DECODING))
    if is_full:
        return every
    return [
        (family, mode, batch, decoding)
        for family, mode, batch, decoding in every
        # The other families differ in their layers, not in what is decoded with them.
        if (family == "llama" or mode == "tree") and (batch == 4) == (decoding == "greedy")
    ]


def everything(ranks: Ranks | None, folder: str, is_full: bool) -> dict[tuple, list]:
    """Ids of the cases: on one process, or as one of the ranks."""
    models = {family: shared(build(family), ranks) for family in FAMILIES}
    found = {}
    for family, mode, batch, decoding in wanted(is_full):
        model = models[family]
        with mock.patch.object(Graphs, "decides_on", return_value=mode == "device"):
            out = answer(model, batch, speculation(model, mode, folder), **DECODING[decoding])
        assert (out.speculation.host_reads["width"] > 0) == (mode == "device")
        found[family, mode, batch, decoding] = out.sequences.tolist()
    return found


def compiled(ranks: Ranks | None) -> dict[str, Any]:
    """Rounds through compiled graphs: ids, rounds, and graphs that the warm-up did not make."""
    pair = build("llama")
    model = shared(Eagle4ForCausalLM(pair.target, pair.drafter, compile="on"), ranks)
    ids, rounds, before = [], 0, 0
    source = random.Random(0)
    for turn in range(8):
        inputs = prompt([source.randint(3, 20)], vocab=VOCAB, seed=turn)
        speculative = speculation(model, "auto") if turn else None
        out = model.generate(
            **inputs,
            max_new_tokens=24,
            do_sample=False,
            speculative=speculative,
            return_dict_in_generate=True,
        )
        assert not out.speculation.fallbacks
        ids.append(out.sequences.tolist())
        rounds += out.speculation.rounds if turn > 1 else 0
        before = num_compiled() if turn < 2 else before
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return {"ids": ids, "rounds": rounds, "late": num_compiled() - before, "breaks": breaks}


def others(ranks: Ranks | None) -> dict[str, Any]:
    """More ways of choosing a token, with drafts that are right often enough to be accepted."""
    model, ids, sent = shared(build("llama"), ranks), {}, {}
    sampled = {"do_sample": True, "seed": 3}
    rejection = {"mode": "tree", "harness": False, "sampling": "rejection", **SIZES}
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "coupled": {**sampled, "top_k": 0, "temperature": 0.7},
        "rejection": {**sampled, "top_k": 0, "speculative": rejection},
        "top_k": {**sampled, "top_k": 5, "top_p": 0.9, "temperature": 0.8},
        "top_k rejection": {**sampled, "top_k": 5, "speculative": rejection},
        "top_p": {**sampled, "top_k": 0, "top_p": 0.8},
        "repetition_penalty": {"do_sample": False, "repetition_penalty": 1.3},
        "scores": {"do_sample": False, "output_scores": True, "output_logits": True},
    }
    for name, way in ways.items():
        out = answer(model, 4, way.pop("speculative", speculation(model, "tree")), **way)
        ids[name] = out.sequences.tolist()
        sent[name] = out.speculation.exchange and out.speculation.exchange["bytes"]
        if name == "scores":
            ids[name] += [torch.stack(x).argmax(-1).tolist() for x in (out.scores, out.logits)]
    inputs = prompt(PROMPTS[4], vocab=VOCAB)
    known = continuations(build("llama").target, inputs, max_new_tokens=20)
    oracle = shared(ScriptedModel(build("llama").target, Mixed(known, VOCAB, [2, 0, 3, 9])), ranks)
    ids["mixed"] = answer(oracle, 4, {"max_depth": 6}, do_sample=False).sequences.tolist()
    assert oracle.last_speculation is not None and oracle.last_speculation.accept_length > 1.5
    streamer = Words()
    model.generate(**prompt([5]), max_new_tokens=6, streamer=streamer, speculative="eagle4")
    return {"others": ids, "bytes": sent, "streamed": streamer.words}


class Words(BaseStreamer):
    """What a streamer was given."""

    def __init__(self):
        self.words: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.words += value.flatten().tolist()

    def end(self) -> None:
        self.words.append(-1)


def shared(model: Eagle4ForCausalLM, ranks: Ranks | None) -> Eagle4ForCausalLM:
    """The model, split if there are ranks."""
    return model if ranks is None else model.shard(ranks)


def answer(model: Eagle4ForCausalLM, batch: int, speculative: Any, **kwargs: Any):
    """One `generate` call without fallbacks."""
    out = model.generate(
        **prompt(PROMPTS[batch], vocab=VOCAB),
        max_new_tokens=8,
        speculative=speculative,
        return_dict_in_generate=True,
        **kwargs,
    )
    assert not out.speculation.fallbacks, out.speculation.fallbacks
    return out


def exchange_at_49k(ranks: Ranks) -> dict[str, tuple[float, float]]:
    """Bytes per round for choosing tokens, and those of whole logits, at a real vocabulary."""
    target = zoo.build("llama", vocab_size=49152, num_hidden_layers=1)
    model = Eagle4ForCausalLM(target, small_drafter(target)).shard(ranks)
    found = {}
    usual = {"top 50": {"do_sample": True, "seed": 7, "top_k": 50, "top_p": 0.9}}
    for decoding, kwargs in (DECODING | usual).items():
        out = answer(model, 4, speculation(model, "tree"), **kwargs)
        report = out.speculation.exchange
        found[decoding] = report["verify_bytes_per_round"], report["whole_bytes_per_round"]
    return found
