"""Catches: a device that decides otherwise than the readable policy would on the same numbers,
nodes that see or sit where they should not, output that depends on what is decided, looks at scores
that the host was not to have, learning from something else than what was drafted.

The tensor code runs eagerly here; `test_graphs` compares its compiled form with it.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from scripted import ScriptedModel, small_drafter

from eagle4.config import SpeculativeConfig
from eagle4.engine import level as levels
from eagle4.engine.on_device import DeviceDraft
from eagle4.harness import HarnessPolicy, policy
from eagle4.harness.nodes import TAUGHT, Nodes
from eagle4.harness.policy import Prices
from eagle4.types import Plan
from profiling.world import CPU
from tests.engine.compare import assert_identical, eagle, prompt, shared_target
from tests.engine.test_harness import Looked

MS = 1_000_000


class Moody(HarnessPolicy):
    """Plain or speculative at random; every round has prices of its own."""

    def __init__(self, config: SpeculativeConfig, seed: int):
        super().__init__(config, CPU.table(frozen=True))
        self.random = random.Random(seed)
        self.compared = 0

    def plan(self, load):
        super().plan(load)
        self._round.speculative = speculative = self.random.random() < 0.7
        return Plan(speculative, self.config.max_depth, self.config.width, self.config.max_nodes)

    def price(self, top_k):
        usual, cheap = super().price(top_k), self.random.choice([0, 1, 1])
        verify = [0]
        for _ in usual.verify_ns[1:]:
            verify.append(verify[-1] + cheap * self.random.choice([0, MS // 50, MS // 9]))
        level = [self.random.randrange(1 + cheap * MS // 4) for _ in usual.level_ns]
        self.prices = usual._replace(
            token_ns=self.random.randint(MS // 2, 9 * MS), verify_ns=verify, level_ns=sorted(level)
        )
        return self.prices

    def drafted(self, draft, prices: Prices):
        """What was told, drafted again in plain Python."""
        super().drafted(draft, prices)
        nodes = self._nodes
        assert isinstance(nodes, Nodes) and self._num_verified is not None
        assert draft.num_chosen >= sum(map(len, draft.chosen))
        if len(draft.limits) < TAUGHT:
            assert nodes.choose(prices) == draft.chosen
            assert nodes.promised(draft.chosen) == draft.promised_q30
            assert draft.num_chosen == sum(map(len, draft.chosen))
        self.compared += 1


class MoodyModel(ScriptedModel):
    """Decides on the device; ``wrap`` may look at the drafts."""

    wrap = staticmethod(lambda draft: draft)

    def _speculation(self, config, request, *pair):
        if config is None:
            return None, None
        assert self.drafter is not None
        self.policy = Moody(config, seed=len(request.pads))
        return self.policy, self.wrap(DeviceDraft(self.drafter, self.policy))


@pytest.fixture
def judged(monkeypatch) -> list[policy.Decision]:
    """Every decision of the device is taken again by `harness.policy`."""
    seen: list[policy.Decision] = []
    original = levels._decision

    def decide(canvas, candidates, terms, shape):
        found = original(canvas, candidates, terms, shape)
        batch = len(canvas.node_BK)
        prices, (deepest, _) = terms.prices(batch, shape.top_k), terms.limits(batch)
        frontier, probs = (
            part.gather(1, canvas.node_BK).tolist() for part in (canvas.survival_BP, canvas.prob_BP)
        )
        book = policy.Book(
            *(part.tolist() for part in terms.book[1:])  # the knots are constants
        )
        expected = policy.next_level(
            *(canvas.survival_BP.tolist(), frontier, probs, int(canvas.depth), int(deepest)),
            *(shape.min_width, shape.top_k, book),
            Prices(
                int(prices.token_ns_Z),
                *(prices.verify_ns_ZR[0].tolist(), prices.level_ns_ZW[0].tolist()),
                shape.max_nodes,
            ),
        )
        assert found.tolist() == [expected.width, expected.gain_ns]
        seen.append(expected)
        return found

    monkeypatch.setattr(levels, "_decision", decide)
    return seen


@pytest.mark.parametrize("limits", [{"max_depth": 1}, {"top_k": 16}, {"max_nodes": 2}], ids=str)
def test_narrow_and_wide_limits(judged, limits):
    """One level only; more children than the drafter has candidates; hardly a node to verify."""
    target = shared_target()
    model = MoodyModel(target, None, small_drafter(target, num_candidates=6))
    inputs = prompt([7, 2, 5], extra=1)
    stats = assert_identical(model, inputs, max_new_tokens=16, speculative=limits)
    assert judged and stats.nodes_verified > 0


@pytest.mark.parametrize("mode", ["auto", "tree", "chain"])
@pytest.mark.parametrize("lengths", [[6], [7, 2, 5, 3], [3] * (TAUGHT + 2)], ids=len)
def test_the_device_decides_like_the_policy_and_the_text_stays(judged, lengths, mode):
    target = shared_target()
    model = MoodyModel(target, None, small_drafter(target))
    stats = assert_identical(
        model,
        prompt(lengths, extra=1),
        max_new_tokens=24,
        speculative={"max_depth": 5, "mode": mode},
    )
    assert 0 < stats.plain_rounds < stats.rounds and model.policy.compared > 0
    widths = {decision.width for decision in judged}
    expected = {"chain": {0, 1}, "tree": {0, 4}}.get(mode)
    assert widths == expected if expected else {0, 1, 4} <= widths
    # One look per level, one per draft; greedy drafts need no other.
    assert stats.host_reads["width"] == len(judged)
    assert stats.host_reads["tree"] == stats.rounds - stats.plain_rounds


def test_coupled_tokens_are_the_same_and_ranked_by_the_noise(judged):
    target = shared_target()
    model = MoodyModel(target, None, small_drafter(target))
    inputs = prompt([6, 3], extra=1)
    for kwargs in ({}, {"temperature": 0.6, "top_p": 0.9}):
        kwargs = {"max_new_tokens": 24, "do_sample": True, "seed": 5, **kwargs}
        wanted = model.generate(**inputs, speculative=None, **kwargs)
        found = model.generate(**inputs, speculative={"max_depth": 4}, **kwargs)
        assert torch.equal(found, wanted)
        stats = model.last_speculation
        assert stats is not None and not stats.fallbacks and stats.nodes_verified > 0
    assert judged


@pytest.mark.parametrize("lengths", [[7], [7, 2, 5]], ids=str)
@pytest.mark.parametrize("switches", [{}, {"sliding_window": 5}], ids=str)
def test_every_node_equals_its_path_drafted_alone(lengths, switches):
    target = shared_target()
    drafter = small_drafter(target, **switches)
    model = MoodyModel(target, None, drafter)
    looked: list[Looked] = []

    def look(draft):
        looked.append(Looked(draft, copy.deepcopy(target), drafter))
        return looked[-1]

    model.wrap = look  # type: ignore[assignment]
    eagle(model, prompt(lengths, extra=1), max_new_tokens=16, speculative={"max_depth": 5})
    assert model.last_speculation is not None and not model.last_speculation.fallbacks
    assert looked[0].compared > 20


@pytest.mark.parametrize("level", [0, 1])
def test_probabilities_that_are_not_finite_end_speculation_only(level, monkeypatch):
    target = shared_target()
    model = MoodyModel(target, None, small_drafter(target))
    inputs = prompt([6], extra=1)
    wanted = model.generate(**inputs, speculative=None, do_sample=False, max_new_tokens=20)
    assert model.drafter is not None
    propose, calls = model.drafter.propose, []

    def broken(head_RH, top_k):
        calls.append(len(calls))
        found = propose(head_RH, top_k)
        return found._replace(logp_RK=found.logp_RK * (float("nan") if len(calls) > level else 1))

    monkeypatch.setattr(model.drafter, "propose", broken)
    found = eagle(model, inputs, max_new_tokens=20)
    assert torch.equal(found, wanted)
    assert model.last_speculation is not None
    assert any("not finite" in reason for reason in model.last_speculation.fallbacks)
