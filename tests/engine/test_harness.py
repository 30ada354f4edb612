"""Catches: output that depends on what the harness decides, drafter forwards in plain mode, drafts
of varying width that see or sit where they should not, a drafter that is not caught up after plain
rounds, features that pile up, costs of another setup that are used, tables measured twice.
"""

from __future__ import annotations

import copy
import json
import random
import time

import pytest
from scripted import ScriptedModel, small_drafter

from eagle4 import Eagle4ForCausalLM
from eagle4.config import SpeculativeConfig
from eagle4.engine import home, plans
from eagle4.engine.adaptive import AdaptiveDraft
from eagle4.harness import HarnessPolicy
from eagle4.harness.acceptance import Experience
from eagle4.harness.nodes import Nodes
from eagle4.harness.profile_file import write
from eagle4.types import Plan
from profiling.rivals import HarnessRun
from profiling.world import CPU, FREE_DRAFTER, LINEAR, Process
from tests.engine.compare import assert_identical, eagle, plain, prompt, shared_target
from tests.engine.test_caches import true_features
from tests.engine.test_drafting import PathLaw
from tests.tree.test_grow_prune import nodes_of

COSTS = {"cpu": CPU, "linear": LINEAR, "free": FREE_DRAFTER}


def model_of(**switches) -> Eagle4ForCausalLM:
    return Eagle4ForCausalLM(shared_target(), small_drafter(shared_target(), **switches))


def profile(model: Eagle4ForCausalLM, costs, path) -> dict:
    """``speculative=`` with these costs, as if they had been measured here."""
    here = home.fingerprint(model.adapter, model.drafter)
    write(path, costs.table(fingerprint=here), Experience())
    return {"profile": str(path)}


class Restless(HarnessPolicy):
    """Decides at random: plain or speculative, any width, any closed set of nodes."""

    def __init__(self, config: SpeculativeConfig, seed: int):
        super().__init__(config, CPU.table(frozen=True))
        self.random = random.Random(seed)

    def plan(self, load):
        super().plan(load)
        speculative = self.random.random() < 0.6
        self._round.speculative = speculative
        return Plan(speculative, self.config.max_depth, self.config.width, self.config.max_nodes)

    def next_width(self, frontier, plan):
        if self._nodes.depth >= plan.max_depth or self.random.random() < 0.2:
            return 0
        return self.random.randint(1, len(frontier[0]))

    def choose(self, tokens, plan):
        chosen = super().choose(tokens, plan)
        if not isinstance(self._nodes, Nodes):
            return chosen
        self._chosen = []
        for b, row in enumerate(self._nodes.survival):
            kept: set[int] = set()
            for i, parent in enumerate(self._nodes.parent[b]):
                if (parent < 0 or parent in kept) and row[i] and self.random.random() < 0.6:
                    kept.add(i)
            self._chosen.append(sorted(kept)[: plan.max_nodes])
        self._num_verified = sum(map(len, self._chosen))
        return self._chosen


class RestlessModel(ScriptedModel):
    """Every call decides at random; ``wrap`` may look at the drafts."""

    wrap = staticmethod(lambda draft: draft)

    def _speculation(self, config, request, *pair):
        if config is None:
            return None, None
        policy = Restless(config, seed=len(request.pads))
        assert self.drafter is not None
        return policy, self.wrap(AdaptiveDraft(self.drafter, policy))


@pytest.mark.parametrize("costs", sorted(COSTS))
@pytest.mark.parametrize("lengths", [[6], [7, 2, 5, 3]], ids=str)
def test_greedy_output_is_the_same_whatever_it_costs(tmp_path, costs, lengths):
    model = model_of()
    speculative = profile(model, COSTS[costs], tmp_path / "p.json")
    inputs = prompt(lengths, extra=1)
    eos = int(plain(model, inputs, max_new_tokens=30)[0, -12])
    for kwargs in ({}, {"eos_token_id": eos}, {"repetition_penalty": 1.3}):
        stats = assert_identical(
            model, inputs, max_new_tokens=40, speculative=speculative, **kwargs
        )
        report = stats.harness
        assert report is not None
        json.dumps(stats.to_dict())
        if costs == "linear":
            assert stats.draft_calls == 0 and stats.plain_rounds == stats.rounds
            # The last token of a row leaves no room for a draft, so nobody is asked.
            assert report["rounds"]["hopeless"] >= stats.rounds - 1
        if costs == "free":
            assert stats.nodes_verified > 0


@pytest.mark.parametrize("lengths", [[6], [7, 2, 5, 3], [3] * 18], ids=str)
def test_greedy_output_is_the_same_whatever_is_decided(lengths):
    target = shared_target()
    model = RestlessModel(target, None, small_drafter(target))
    stats = assert_identical(
        model, prompt(lengths, extra=1), max_new_tokens=30, speculative={"max_depth": 4}
    )
    assert 0 < stats.plain_rounds < stats.rounds


@pytest.mark.parametrize("costs", sorted(COSTS))
@pytest.mark.parametrize("lengths", [[6], [7, 2, 5, 3]], ids=str)
def test_coupled_tokens_are_the_same_whatever_it_costs(tmp_path, costs, lengths):
    model = model_of()
    speculative = profile(model, COSTS[costs], tmp_path / "p.json")
    inputs = prompt(lengths, extra=1)
    for kwargs in ({}, {"temperature": 0.5, "top_p": 0.9}, {"repetition_penalty": 1.3}):
        kwargs = {"max_new_tokens": 40, "do_sample": True, "seed": 3, **kwargs}
        wanted = model.generate(**inputs, speculative=None, **kwargs)
        assert model.generate(**inputs, speculative=speculative, **kwargs).equal(wanted)
        stats = model.last_speculation
        assert stats is not None and not stats.fallbacks
        assert (stats.nodes_verified > 0) == (costs != "linear")


@pytest.mark.parametrize("costs", sorted(COSTS))
def test_drawn_trees_follow_the_costs(tmp_path, costs):
    """A drawn tree is as large as pays, and a frozen profile decides the same every time."""
    model = model_of()
    speculative = {**profile(model, COSTS[costs], tmp_path / "p.json"), "sampling": "rejection"}
    kwargs = {"max_new_tokens": 60, "do_sample": True, "seed": 3, "speculative": speculative}
    inputs = prompt([7, 2, 5])
    first = model.generate(**inputs, **kwargs)
    stats = model.last_speculation
    assert stats is not None and not stats.fallbacks and stats.harness is not None
    assert model.generate(**inputs, **kwargs).equal(first)
    verified = {int(n) for n in stats.harness["nodes_verified"]}
    if costs == "linear":
        assert not verified and stats.draft_calls == 0
    if costs == "free":
        assert max(verified) > 3


class Looked:
    """Every verified node is compared with its path drafted alone."""

    def __init__(self, draft, target, drafter):
        self.draft, self.target, self.drafter, self.compared = draft, target, drafter, 0

    def __call__(self, state, sequences, plan, depth_limit, stats):
        tree = self.draft(state, sequences, plan, depth_limit, stats)
        for b, sequence in enumerate(sequences):
            ids = state.tokens(sequence)
            features = true_features(self.target, self.drafter.config.tap_layers, ids)
            law = PathLaw(self.drafter, features, ids, min(plan.top_k, self.drafter.num_proposable))
            for node in nodes_of(tree, b):
                score = 0.0
                for end in range(len(node.path)):
                    score += dict(law(node.path[:end]))[node.path[end]]
                assert score == pytest.approx(node.score, rel=1e-3, abs=1e-3)
                assert len(node.path) <= depth_limit[b]
                self.compared += 1
        return tree


@pytest.mark.parametrize("lengths", [[7], [7, 2, 5]], ids=str)
@pytest.mark.parametrize("switches", [{}, {"sliding_window": 5}], ids=str)
def test_every_node_of_any_width_equals_its_path_drafted_alone(lengths, switches):
    target = shared_target()
    drafter = small_drafter(target, **switches)
    model = RestlessModel(target, None, drafter)
    looked: list[Looked] = []
    model.wrap = lambda draft: (
        looked.append(Looked(draft, copy.deepcopy(target), drafter))
        or (  # type: ignore
            looked[-1]
        )
    )
    eagle(model, prompt(lengths, extra=1), max_new_tokens=12, speculative={"max_depth": 5})
    assert model.last_speculation is not None and not model.last_speculation.fallbacks
    assert looked[0].compared > 20


def test_features_do_not_pile_up_where_speculation_never_pays(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "MOST_PENDING", 8)
    model = model_of()
    speculative = profile(model, LINEAR, tmp_path / "p.json")
    inputs = prompt([4, 6])
    out = eagle(
        model, inputs, max_new_tokens=40, speculative=speculative, return_dict_in_generate=True
    )
    assert out.sequences.tolist() == plain(model, inputs, max_new_tokens=40).tolist()
    assert out.speculation.fallbacks == {"speculation did not pay for long": 1}
    assert out.speculation.draft_calls == 0


def test_a_profile_from_elsewhere_is_refused_before_the_first_forward(tmp_path):
    model, other = model_of(), model_of(candidate_rank=4)
    speculative = profile(other, CPU, tmp_path / "p.json")
    calls = []
    model.target.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="drafter: .* there, .* here"):
        eagle(model, prompt([4]), speculative=speculative)
    with pytest.raises(OSError):
        eagle(model, prompt([4]), speculative={"profile": str(tmp_path / "absent.json")})
    assert not calls


def test_a_frozen_profile_decides_the_same_every_time(tmp_path):
    model = model_of()
    speculative = profile(model, CPU, tmp_path / "p.json")
    before = (tmp_path / "p.json").read_bytes()
    reports = []
    for _ in range(2):
        eagle(model, prompt([5, 3]), max_new_tokens=40, speculative=speculative)
        assert model.last_speculation is not None and model.last_speculation.harness
        reports.append({k: v for k, v in model.last_speculation.harness.items() if k != "ms"})
    assert reports[0] == reports[1] and (tmp_path / "p.json").read_bytes() == before


def test_costs_are_measured_once_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE4_PROFILES", str(tmp_path))
    grid = home.COARSE._replace(repeats=1, verify_rows=(1, 4), plain_batches=(1, 2))
    monkeypatch.setattr(home, "COARSE", grid)
    measured = []
    original = home.measure_pair
    monkeypatch.setattr(home, "measure_pair", lambda *a: measured.append(1) or original(*a))
    model = model_of()
    eagle(model, prompt([4]), max_new_tokens=8)
    assert not measured and model.last_speculation.harness is None, "too small to be worth it"
    assert_identical(model, prompt([4, 2]), max_new_tokens=40)
    eagle(model, prompt([4]), max_new_tokens=80)
    assert len(measured) == 1 and model.last_speculation.harness is not None
    (file,) = tmp_path.iterdir()
    eagle(model_of(), prompt([4]), max_new_tokens=80)
    assert len(measured) == 1, "another process finds the file"
    file.write_text(file.read_text()[:100])
    assert_identical(model_of(), prompt([4]), max_new_tokens=80)
    assert len(measured) == 2, "a broken file is measured again"


def test_costs_from_a_disturbed_moment_are_measured_again_once(tmp_path, monkeypatch):
    """Nonsense that rules out speculation must not stay, least of all on disk."""
    monkeypatch.setenv("EAGLE4_PROFILES", str(tmp_path))
    tables, stalled = [], LINEAR._replace(row_ns=1e9, few_row_ns=1e9)

    def measured(target, drafter, grid, here, graphs):
        tables.append(stalled.table(fingerprint=here))
        return tables[-1]

    monkeypatch.setattr(home, "measure_pair", measured)
    model = model_of()
    for count in (1, 2, 2):
        assert_identical(model, prompt([4]), max_new_tokens=80)
        assert len(tables) == count
        assert tables[-1].is_off and len(list(tmp_path.iterdir())) == count - 1


def test_without_the_harness_the_limits_are_the_shape():
    model = model_of()
    fixed = {"harness": False, "max_depth": 2, "top_k": 2, "max_nodes": 3}
    stats = assert_identical(model, prompt([5]), max_new_tokens=80, speculative=fixed)
    assert stats.harness is None and stats.plain_rounds <= 1


def test_its_own_time_is_small():
    """Generous bounds: what a loaded machine may take, far above what a quiet one does."""
    policy = HarnessPolicy(SpeculativeConfig(), CPU.table())
    run, inside = HarnessRun(policy, CPU, 1), []
    for name in ("plan", "begin_draft", "add_level", "next_width", "choose", "timed", "observe"):
        original = getattr(policy, name)

        def timed(*args, original=original):
            start = time.perf_counter()
            result = original(*args)
            inside.append(time.perf_counter() - start)
            return result

        setattr(policy, name, timed)
    run.rounds(Process.mixed(1.0), 200)
    assert sum(inside) / 200 < 0.005 and sorted(inside)[len(inside) // 2] < 0.0005
