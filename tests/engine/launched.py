"""The same model twice, directly launched and replayed."""

from __future__ import annotations

import torch
from scripted import small_drafter

from eagle4.engine.replay import Replays
from eagle4.engine.speculation import policy_and_draft
from tests.engine.compare import prompt, shared_target
from tests.engine.test_on_device import MoodyModel

FIXED = {"harness": False, "max_depth": 4, "max_nodes": 7}


def replays_of(model) -> Replays:
    (graphs,) = model._graphs.made.values()
    return graphs.replays


def recorded_functions(model) -> dict[str, int]:
    """How many recordings every function has."""
    return {f._name: f.num_recordings for f in replays_of(model)._functions}


class Launched:
    """Two models of the same parts; the device decides, or ``decides`` as usual."""

    def __init__(self, target=None, decides: bool = True, **switches):
        target = target or shared_target()
        drafter = small_drafter(target, **switches)
        self.models = [MoodyModel(target, None, drafter) for _ in range(2)]
        for model, mode in zip(self.models, ("direct", "graphs"), strict=True):
            model.launch_mode = mode
            if not decides:
                model._speculation = policy_and_draft

    @property
    def replayed(self) -> MoodyModel:
        return self.models[1]

    def same(self, lengths: list[int], speculative=None, **kwargs):
        """Both say and decide the same; returns what the replayed one returned."""
        kwargs = {"max_new_tokens": 40, "do_sample": False, **kwargs}
        outs, told = [], []
        for model in self.models:
            inputs = prompt(lengths, extra=1)
            given = speculative or {"max_depth": 4}
            outs.append(
                model.generate(**inputs, speculative=given, return_dict_in_generate=True, **kwargs)
            )
            stats = outs[-1].speculation
            assert not stats.fallbacks, stats.fallbacks
            told.append((stats.accepted_per_round, stats.nodes_drafted, stats.nodes_verified))
            told[-1] += (stats.host_reads, stats.draft_calls)
        assert torch.equal(outs[0].sequences, outs[1].sequences)
        assert told[0] == told[1]
        return outs[1]
