"""Catches: a real model on three ranks (9 heads, 3 key/value heads) that answers otherwise than on
one process, packed weights that are not used on shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle4 import Eagle4ForCausalLM, demo
from eagle4.parallel import Ranks
from tests.parallel.world import run_world

MODES: dict[str, Any] = {
    "tree": {"mode": "tree", "harness": False, "max_depth": 4, "max_nodes": 11},
    "chain": {"mode": "chain", "harness": False, "max_depth": 4},
    "auto": {"mode": "auto"},
    "plain": None,
}
TEXTS = ["The three laws of robotics are", "Once upon a time", "2 + 2 =", "def is_prime(n):"]


def answers(ranks: Ranks | None, drafter: str) -> dict[str, Any]:
    """Ids and accept lengths of every mode, batch 1 and 4, greedy and coupled."""
    target, tokenizer = demo.smollm2(dtype=torch.float32)
    model = Eagle4ForCausalLM.from_pretrained(target, drafter, tokenizer=tokenizer)
    if ranks is not None:
        model.shard(ranks)
    found: dict[str, Any] = {}
    for mode, config in MODES.items():
        for batch, sample in ((1, False), (4, True), (4, False), (1, True)):
            inputs = tokenizer(TEXTS[:batch], return_tensors="pt", padding=True)
            how = {"do_sample": True, "seed": 1, "top_k": 0} if sample else {"do_sample": False}
            out = model.generate(
                **inputs, **how, max_new_tokens=16, speculative=config, return_dict_in_generate=True
            )
            assert not out.speculation.fallbacks
            found[f"{mode} {batch} {how}"] = out.sequences.tolist()
            if mode == "tree":
                found[f"accept length {batch} {how}"] = out.speculation.accept_length
    packed = len(model.adapter._packed._packed)
    assert packed > 100, "weights are packed, shares as well"
    return found


@pytest.mark.slow
def test_smollm2_on_three_ranks_answers_as_on_one(demo_target, demo_drafter_path):
    wanted = answers(None, str(demo_drafter_path))
    lengths = {name: value for name, value in wanted.items() if name.startswith("accept")}
    assert max(lengths.values()) > 2
    for own in run_world(3, answers, str(demo_drafter_path), timeout_s=300.0, limit_s=1500.0):
        # The drafter's near ties may fall otherwise when sums are split; texts never do.
        assert {name: own.pop(name) for name in lengths} == pytest.approx(lengths, rel=0.1)
        assert own == {name: value for name, value in wanted.items() if name not in lengths}
