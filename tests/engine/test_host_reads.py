"""Catches: a greedy round that makes the host wait for the device where nobody said that it does
(M3); a copy of the ids on the CPU that falls behind.

The ways in which Python looks into a tensor are watched during rounds. What is read has a name in
`SpeculationStats.host_reads`; the rest are questions about the ids' copy on the CPU.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from scripted import small_drafter

from eagle4 import Eagle4ForCausalLM
from eagle4.engine.call import CACHE_KEYWORD
from eagle4.engine.graphs import Graphs
from eagle4.engine.state import State
from profiling.world import CPU, FREE_DRAFTER
from tests.engine.compare import prompt, shared_target
from tests.engine.test_harness import profile

LOOKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy")
# The ids' own copy on the CPU: stop rules, streaming, what was committed.
ON_HOST = {"commit.py:_stops", "state.py:committed", "output.py:_token"}


class Watch:
    """Counts looks into tensors by the function of the engine that asked."""

    def __init__(self, monkeypatch):
        self.found: Counter[str] = Counter()
        self.is_on = False
        for name in LOOKS:
            monkeypatch.setattr(torch.Tensor, name, self.watched(getattr(torch.Tensor, name)))

    def watched(self, original):
        def look(tensor, *args, **kwargs):
            if self.is_on:
                self.is_on = False
                place = self.place()
                if place is not None:
                    self.found[place] += 1
                self.is_on = True
            return original(tensor, *args, **kwargs)

        return look

    @staticmethod
    def place() -> str | None:
        """The innermost function of the package, as file:function."""
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if "/eagle4/" in code.co_filename and "/tests/" not in code.co_filename:
                return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_name}"
            frame = frame.f_back
        return None


@pytest.mark.parametrize("costs", [CPU, FREE_DRAFTER], ids=["cpu", "free"])
@pytest.mark.parametrize("lengths", [[6], [7, 2, 5, 3]], ids=str)
def test_every_look_has_a_name(monkeypatch, tmp_path, lengths, costs):
    monkeypatch.setattr(Graphs, "decides_on", lambda self, device: True)
    model = Eagle4ForCausalLM(shared_target(), small_drafter(shared_target()))
    speculative = profile(model, costs, tmp_path / "p.json")
    inputs = prompt(lengths, extra=1)
    watch = Watch(monkeypatch)
    from eagle4.engine import loop

    original = loop._round

    def watched_round(*args):
        watch.is_on = True
        original(*args)
        watch.is_on = False

    monkeypatch.setattr(loop, "_round", watched_round)
    kwargs = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": 7}
    model.generate(**inputs, speculative=speculative, **kwargs)
    stats = model.last_speculation
    assert stats is not None and not stats.fallbacks
    reads = dict(stats.host_reads)
    drafted = stats.rounds - stats.plain_rounds
    assert drafted and reads.pop("prefill") == len(lengths)
    assert reads.pop("verdict") == stats.rounds
    assert reads.pop("nodes") == reads.pop("tree") == drafted
    # Depth 0 and every level: what comes next.
    assert reads.pop("width") == stats.draft_calls and not reads
    named = sum(stats.host_reads.values()) - len(lengths)
    assert watch.found.pop("stats.py:read") == named
    assert set(watch.found) <= ON_HOST


@pytest.mark.parametrize("lengths", [[6], [7, 2, 5, 3]], ids=str)
def test_the_copy_of_the_ids_keeps_up(monkeypatch, lengths):
    """As on a device: two buffers, of which the engine writes both, also when they grow."""

    def apart(self):
        original(self)
        self.host_ids_BT = self.ids_BT.clone()

    original = State.grow
    monkeypatch.setattr(State, "grow", apart)
    model = Eagle4ForCausalLM(shared_target(), small_drafter(shared_target()))
    inputs = prompt(lengths, extra=1)
    kwargs = {"do_sample": False, "max_new_tokens": 90, "eos_token_id": 7}
    out = model.generate(
        **inputs, speculative={"harness": False}, return_dict_in_generate=True, **kwargs
    )
    state = out[CACHE_KEYWORD].state
    assert state.host_ids_BT is not state.ids_BT
    assert torch.equal(state.host_ids_BT, state.ids_BT)
    assert torch.equal(out.sequences, model.target.generate(**inputs, **kwargs))
