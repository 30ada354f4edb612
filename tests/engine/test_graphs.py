"""Catches: a compiled round that computes something else than the eager one, graph breaks, graphs
compiled again and again as trees, batches and contexts change (M1, M2), graphs of one model that
serve another (M4), content of an old call in a compiled one (M5), and a function that cannot be
compiled taking the request down with it.

The eager functions are the specification. Everything here runs on the CPU through Inductor.
"""

from __future__ import annotations

import functools
import logging
import random
import shutil

import pytest
import torch
from scripted import small_drafter
from tiny import tiny_llama
from transformers import LogitsProcessorList

from eagle4 import Eagle4ForCausalLM, SpeculativeConfig
from eagle4.engine import graphs as graphs_module
from eagle4.engine.canvas import TreeLimits
from eagle4.engine.drafting import EagleDraft
from eagle4.engine.graphs import EAGER, Graphs, num_compiled
from eagle4.engine.home import fingerprint
from eagle4.engine.on_device import DeviceDraft
from eagle4.engine.reference import prefill, verify
from eagle4.engine.sampler import Sampler
from eagle4.engine.state import State
from eagle4.engine.stats import SpeculationStats
from eagle4.engine.warmup import warm_up
from eagle4.harness import FixedPolicy
from eagle4.target import TargetAdapter
from eagle4.types import Load, Tree
from tests.engine.compare import prompt
from tests.engine.test_on_device import Moody

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler"
)
VOCAB = 96
TOLERANCE = dict(rtol=1e-4, atol=1e-4)


class Pair:
    """One target and drafter with one set of compiled functions, shared by this file's tests."""

    def __init__(self):
        # Three K/V heads: a level of three nodes must not be taken for something about heads.
        heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
        self.target = tiny_llama(vocab=VOCAB, layers=3, hidden=48, **heads)
        self.drafter = small_drafter(self.target)
        self.adapter = TargetAdapter(self.target, self.drafter.config.tap_layers)
        self.drafter.bind(
            self.target.get_input_embeddings(), self.target.get_output_embeddings()
        ).eval()
        self.compiled = Graphs(compiled=True)
        self.config = SpeculativeConfig(max_depth=5)
        for batch in (1, 2):
            for limits in (None, TreeLimits.of(self.config, self.drafter)):
                warm_up(self.compiled, self.adapter, self.drafter, batch, limits)
        self.num_warm = num_compiled()

    @torch.no_grad()
    def prefilled(self, lengths: list[int], seed: int, graphs: Graphs) -> State:
        inputs = prompt(lengths, seed=seed, vocab=VOCAB)
        pads = [max(lengths) - length for length in lengths]
        state = State(inputs["input_ids"], pads, 0, graphs=graphs)
        with self.adapter.attached(run_blocks=graphs.blocks):
            for sequence in state.sequences:
                prefill(state, sequence, self.adapter, False)
                # The prompt's last token stands for the root: its K/V is written again.
                sequence.kv_length -= 1
                sequence.keep(sequence.take(sequence.num_pending)[:-1])
        return state

    @torch.no_grad()
    def verified(self, state: State, tree: Tree):
        processors = [LogitsProcessorList() for _ in state.sequences]
        with self.adapter.attached(run_blocks=state.graphs.blocks):
            return verify(state, state.sequences, tree, self.adapter, processors)

    @torch.no_grad()
    def drafted(self, state: State, config: SpeculativeConfig) -> Tree:
        policy = FixedPolicy(config)
        draft = EagleDraft(self.drafter, policy)
        limits = [config.max_depth] * len(state.sequences)
        plan = policy.plan(Load(len(state.sequences)))
        return draft(state, state.sequences, plan, limits, SpeculationStats())

    @torch.no_grad()
    def decided(
        self, state: State, seed: int, samples: bool = False
    ) -> tuple[Tree, SpeculationStats]:
        """A draft that the device decides on, at random prices."""
        if samples:
            keys = list(range(len(state.sequences)))
            state.sampler = Sampler(keys, LogitsProcessorList())
        policy = Moody(self.config, seed)
        plan = policy.plan(Load(len(state.sequences), 20))
        limits = [policy.random.randint(1, 5) for _ in state.sequences]
        stats = SpeculationStats()
        draft = DeviceDraft(self.drafter, policy)
        return draft(state, state.sequences, plan, limits, stats), stats


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def random_tree(source: random.Random, batch: int, most: int = 16) -> Tree:
    """Any shape, any tokens, every sequence its own number of nodes."""
    nodes = source.randint(1, most)
    token = torch.zeros(batch, nodes, dtype=torch.int64)
    parent = torch.full((batch, nodes), -1)
    depth = torch.zeros(batch, nodes, dtype=torch.int64)
    counts = [source.randint(1, nodes) for _ in range(batch)]
    for b, count in enumerate(counts):
        for node in range(count):
            parent[b, node] = source.randint(-1, node - 1)
            above = int(parent[b, node])
            depth[b, node] = 1 if above < 0 else int(depth[b, above]) + 1
            token[b, node] = source.randrange(VOCAB)
    live = torch.arange(nodes) < torch.tensor(counts).unsqueeze(1)
    score = torch.where(live, -depth.float(), float("-inf"))
    return Tree(token, parent, depth, score, torch.tensor(counts))


def assert_same_verification(one, other, is_tie_free: bool) -> None:
    for a, b in zip(one.scores, other.scores, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    torch.testing.assert_close(one.output.features_RTH, other.output.features_RTH, **TOLERANCE)
    assert one.first_row == other.first_row
    if is_tie_free:
        for a, b in zip(one.verdict, other.verdict, strict=True):
            assert torch.equal(a, b)


def smallest_gap(verified) -> float:
    """Between the best and the second-best score of any row."""
    best = torch.cat(verified.scores).topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


@needs_compiler
def test_nothing_is_compiled_after_the_warm_up(pair):
    """200 rounds with changing trees, batches 1 to 8 and contexts; 0 graph breaks throughout."""
    source = random.Random(2)

    def rounds(count: int, batches: list[int]) -> None:
        for batch in batches:
            lengths = [source.randint(2, 60) for _ in range(batch)]
            for top_k in (1, 2, 3, 4):
                state = pair.prefilled(lengths, source.randrange(1 << 30), pair.compiled)
                pair.drafted(state, SpeculativeConfig(max_depth=3, top_k=top_k, harness=False))
                state = pair.prefilled(lengths, source.randrange(1 << 30), pair.compiled)
                pair.decided(state, source.randrange(1 << 30), samples=top_k > 2)
            for _ in range(count):
                pair.verified(state, random_tree(source, batch))

    rounds(25, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pair.num_warm > 0
    assert num_compiled() == pair.num_warm
    assert not torch._dynamo.utils.counters["graph_break"]


@needs_compiler
def test_compiled_rounds_equal_eager_rounds_on_1000_random_states(pair):
    """Scores, taps, verdicts and stored K/V; batches 1 to 4, ragged prompts, any tree."""
    source = random.Random(0)
    states = tied = 0
    while states < 1000:
        lengths = [source.randint(2, 40) for _ in range(source.choice([1, 1, 2, 3, 4]))]
        seed = source.randrange(1 << 30)
        eager, compiled = (pair.prefilled(lengths, seed, g) for g in (EAGER, pair.compiled))
        for _ in range(20):
            tree = random_tree(source, len(lengths))
            found = [pair.verified(state, tree) for state in (eager, compiled)]
            is_tie_free = smallest_gap(found[0]) > 1e-3
            tied += not is_tie_free
            assert_same_verification(*found, is_tie_free)
            states += 1
        for layer, stored in eager.target_pool.layers.items():
            for a, b in zip(stored, compiled.target_pool.layers[layer], strict=True):
                torch.testing.assert_close(a, b, **TOLERANCE)
    assert tied < 100, "nearly every state must decide its verdict"


@needs_compiler
def test_compiled_drafts_equal_eager_drafts(pair):
    """Trees and chains of several depths; the draft cache too."""
    source = random.Random(1)
    for _ in range(30):
        lengths = [source.randint(3, 40) for _ in range(source.choice([1, 2, 3]))]
        config = SpeculativeConfig(
            mode=source.choice(["tree", "chain"]), max_depth=source.randint(1, 5), harness=False
        )
        seed = source.randrange(1 << 30)
        states = [pair.prefilled(lengths, seed, g) for g in (EAGER, pair.compiled)]
        trees = [pair.drafted(state, config) for state in states]
        torch.testing.assert_close(trees[0].score_BN, trees[1].score_BN, **TOLERANCE)
        for a, b in zip(trees[0], trees[1], strict=True):
            if not a.is_floating_point():
                assert torch.equal(a, b)
        keys = [state.draft_pool.layers[0][0] for state in states]
        torch.testing.assert_close(*keys, **TOLERANCE)


def test_the_smallest_trees_are_warmed_up_and_drafted(monkeypatch):
    """One level: there is nothing to expand. One child per node: every width is 1."""
    traced = functools.partial(torch.compile, backend="eager")  # Inductor has nothing to add
    monkeypatch.setattr(graphs_module.torch, "compile", traced)
    target = tiny_llama(vocab=VOCAB, layers=2)
    model = Eagle4ForCausalLM(target, small_drafter(target), compile="on")
    inputs = prompt([6], vocab=VOCAB)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=9, disable_compile=True)
    drafter = model.drafter
    assert drafter is not None
    for limits in ({"max_depth": 1, "top_k": 2}, {"max_depth": 3, "top_k": 1}):
        config = SpeculativeConfig(**limits)
        draft = DeviceDraft(drafter, Moody(config, 0))
        model._speculation = lambda *args, d=draft: (d.policy, d)  # type: ignore[method-assign]
        before = num_compiled()
        found = model.generate(**inputs, do_sample=False, max_new_tokens=9, speculative=config)
        assert torch.equal(found, expected) and num_compiled() > before
        assert not model.last_speculation.fallbacks


def test_limits_have_functions_of_their_own():
    """So that no configuration uses up another's graphs."""
    graphs = Graphs(compiled=True)
    small, large = (TreeLimits(depth, 2, 8, 1) for depth in (2, 5))
    assert graphs.trees(small).level is not graphs.trees(large).level
    assert graphs.trees(small) is graphs.trees(TreeLimits(2, 2, 8, 1))
    assert EAGER.trees(small) == EAGER.trees(large)


@needs_compiler
def test_compiled_levels_decide_and_draft_like_eager_ones(pair):
    """Trees, decisions (as many levels, as many looks) and the draft cache at random prices."""
    source, levels, before = random.Random(3), 0, num_compiled()
    for _ in range(60):
        lengths = [source.randint(3, 40) for _ in range(source.choice([1, 1, 2, 3]))]
        seed, prices = source.randrange(1 << 30), source.randrange(1 << 30)
        states = [pair.prefilled(lengths, seed, g) for g in (EAGER, pair.compiled)]
        (one, reads), (other, other_reads) = (pair.decided(state, prices) for state in states)
        assert reads.host_reads == other_reads.host_reads
        levels += reads.host_reads["width"] - 1
        torch.testing.assert_close(one.score_BN, other.score_BN, **TOLERANCE)
        for a, b in zip(one, other, strict=True):
            if not a.is_floating_point():
                assert torch.equal(a, b)
        keys = [state.draft_pool.layers[0][0] for state in states]
        torch.testing.assert_close(*keys, **TOLERANCE)
    assert levels > 60
    assert num_compiled() == before


@needs_compiler
def test_generation_says_the_same_and_each_model_has_its_own_graphs():
    """Two models in one process, two prompts through the same graphs, speculative and plain."""
    for seed in (0, 1):
        target = tiny_llama(vocab=VOCAB, layers=2, seed=seed)
        model = Eagle4ForCausalLM(target, small_drafter(target), compile="on")
        eager = Eagle4ForCausalLM(target, small_drafter(target), compile="off")
        before = num_compiled()
        for lengths in ([7], [5]):
            inputs = prompt(lengths, seed=seed, vocab=VOCAB)
            for speculative in (None, SpeculativeConfig(max_depth=3, harness=False)):
                outs = [
                    m.generate(
                        **inputs, do_sample=False, max_new_tokens=24, speculative=speculative
                    )
                    for m in (model, eager)
                ]
                assert torch.equal(*outs)
        assert model._graphs.made and not eager._graphs.made
        assert num_compiled() > before


def test_disable_compile_and_modes_decide(monkeypatch):
    """`disable_compile` wins over "on"; "auto" leaves CPUs alone; other words are refused."""
    target = tiny_llama(vocab=VOCAB, layers=2)
    inputs = prompt([5], vocab=VOCAB)

    def refuse(*args, **kwargs):
        raise AssertionError("nothing may be compiled")

    monkeypatch.setattr(graphs_module.torch, "compile", refuse)
    for mode, kwargs in (("on", {"disable_compile": True}), ("auto", {}), ("off", {})):
        model = Eagle4ForCausalLM(target, small_drafter(target), compile=mode)
        model.generate(**inputs, do_sample=False, max_new_tokens=4, **kwargs)
    with pytest.raises(ValueError, match="compile must be one of"):
        Eagle4ForCausalLM(target, small_drafter(target), compile="max")


@pytest.mark.parametrize("name", ["InternalTorchDynamoError", "FailOnRecompileLimitHit"])
def test_what_cannot_be_compiled_runs_eagerly(monkeypatch, caplog, name):
    """A compiler that fails costs one warning per function, never the request."""
    target = tiny_llama(vocab=VOCAB, layers=2)
    model = Eagle4ForCausalLM(target, small_drafter(target), compile="on")
    inputs = prompt([6], vocab=VOCAB)
    config = SpeculativeConfig(max_depth=3, harness=False)
    arguments = dict(do_sample=False, max_new_tokens=12, speculative=config)
    expected = model.generate(**inputs, disable_compile=True, **arguments)

    def broken(function, **kwargs):
        def call(*args):
            raise getattr(torch._dynamo.exc, name)("no compiler here")

        return call

    monkeypatch.setattr(graphs_module.torch, "compile", broken)
    with caplog.at_level(logging.WARNING, logger="eagle4"):
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **arguments), expected)
    warned = [r.getMessage() for r in caplog.records if "cannot be compiled" in r.getMessage()]
    assert len(warned) == 3 and all("no compiler here" in text for text in warned)
    assert not model.last_speculation.fallbacks
    among_ranks = Graphs(compiled=True, falls_back=False)
    with pytest.raises(getattr(torch._dynamo.exc, name)):
        among_ranks.draft()


def test_a_cost_table_belongs_to_compiled_or_eager_rounds(pair):
    """And to a number of threads: the fingerprint tells them apart."""
    compiled, eager = (fingerprint(pair.adapter, pair.drafter, g) for g in (pair.compiled, EAGER))
    assert compiled != eager
    assert {k for k in eager if eager[k] != compiled[k]} == {"compile"}
    assert eager["threads"] == torch.get_num_threads()
