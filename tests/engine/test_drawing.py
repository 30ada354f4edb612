"""Catches: a drawn tree whose stated laws are not the drafter's at that path (wrong position,
state, visibility or row), siblings that repeat or are not drawn in the order of the noise, a shape
that depends on what was drawn (F6), slots beyond the depth limit, noise that rows share (F9).
"""

from __future__ import annotations

import copy

import pytest
import torch
from scripted import ScriptedModel, small_drafter

from eagle4.config import SpeculativeConfig
from eagle4.engine.drawing import TemplateDraft
from eagle4.engine.sampler import RankAcceptance
from eagle4.harness import FixedPolicy
from eagle4.noise import Purpose, gumbel, position_key
from eagle4.types import Drawn
from tests.engine.compare import prompt, shared_target
from tests.engine.test_caches import true_features
from tests.engine.test_drafting import PathLaw


class Compared:
    """The engine's draws; every law is compared with a drafter that runs the path alone."""

    def __init__(self, target, drafter, config: SpeculativeConfig):
        self.target, self.drafter = target, drafter
        self.draft = TemplateDraft(drafter, FixedPolicy(config))
        self.shapes: list[tuple] = []
        self.compared = 0

    def __call__(self, state, sequences, plan, depth_limit, stats):
        drawn = self.draft(state, sequences, plan, depth_limit, stats)
        assert isinstance(drawn, Drawn)
        for b, sequence in enumerate(sequences):
            self.compare(drawn, b, state, sequence, depth_limit[b])
        tree = drawn.tree
        self.shapes.append((tree.parent_BN.tolist(), tree.depth_BN.tolist()))
        return drawn

    def compare(self, drawn: Drawn, b: int, state, sequence, limit: int) -> None:
        tree, law = drawn
        ids = state.tokens(sequence)
        features = true_features(self.target, self.drafter.config.tap_layers, ids)
        reference = PathLaw(self.drafter, features, ids, self.drafter.num_proposable)
        paths: list[tuple[int, ...]] = [()]
        for node in range(int(tree.count_B[b])):
            parent = int(tree.parent_BN[b, node])
            paths.append((*paths[parent + 1], int(tree.token_BN[b, node])))
            assert len(paths[-1]) == int(tree.depth_BN[b, node]) <= limit
        for row, path in enumerate(paths):
            children = [
                int(tree.token_BN[b, node])
                for node in range(len(paths) - 1)
                if int(tree.parent_BN[b, node]) == row - 1
            ]
            if not children:
                continue
            wanted = dict(reference(path))
            tokens = law.token_BRC[b, row].tolist()
            logp = torch.tensor([wanted[token] for token in tokens]) / 0.7
            torch.testing.assert_close(
                law.logp_BRC[b, row], logp.double().log_softmax(0), atol=1e-3, rtol=1e-3
            )
            key = state.sampler.keys[sequence.index]
            position = position_key(key, Purpose.DRAFT, sequence.length + len(path))
            rank = law.logp_BRC[b, row] + gumbel(position, law.token_BRC[b, row])
            order = law.token_BRC[b, row][rank.argsort(descending=True)]
            assert children == order[: len(children)].tolist()
            self.compared += 1


@pytest.mark.parametrize(
    ("lengths", "config", "switches"),
    [
        ([7], dict(max_depth=4, top_k=3, max_nodes=14), {}),
        ([7, 2, 5, 3], dict(max_depth=6, top_k=2, max_nodes=6), {}),
        ([4, 9, 1], dict(max_depth=6, mode="chain"), {"eh_proj": False, "norm_output": False}),
        ([9, 3], dict(max_depth=4, top_k=3, max_nodes=20), {"sliding_window": 5}),
        ([6], dict(max_depth=3, top_k=4, max_nodes=12), {"candidate_rank": 0, "own_lm_head": True}),
        ([5], dict(max_depth=3, top_k=6, max_nodes=12), {"num_candidates": 3}),
    ],
    ids=str,
)
def test_every_law_is_the_drafters_own(lengths, config, switches):
    target = shared_target()
    drafter = small_drafter(target, **switches)
    model = ScriptedModel(target, None, drafter)
    model.draft = Compared(copy.deepcopy(target), drafter, SpeculativeConfig(**config))
    first = []
    for seed in (1, 2, 3):
        model.draft.shapes.clear()
        model.generate(
            **prompt(lengths, extra=1),
            max_new_tokens=7,
            do_sample=True,
            temperature=0.7,
            top_k=0,
            seed=seed,
            speculative={**config, "sampling": "rejection"},
        )
        assert not model.last_speculation.fallbacks, model.last_speculation.fallbacks
        first.append(model.draft.shapes[0])
    assert first[0] == first[1] == first[2], "the first shape cannot know the draws"
    assert model.draft.compared > 10


def test_acceptance_by_rank_starts_at_the_prior_and_follows_the_verdicts():
    ranks = RankAcceptance()
    prior = ranks.table(2, 3)
    assert prior[0] == prior[1] and prior[0][0] == pytest.approx(RankAcceptance.PRIOR[0])
    assert prior[0][1] == pytest.approx((1 - prior[0][0]) * RankAcceptance.PRIOR[1])
    for _ in range(1000):
        ranks.record(0, 1, 3)  # the first child fails, the second is taken
        ranks.record(1, 2, 2)  # both fail
    table = ranks.table(3, 3)
    assert table[0][0] < 0.02 and table[0][1] > 0.95 and table[0][2] < 0.02
    assert max(table[1][:2]) < 0.02
    assert table[2] == prior[1], "another depth has learnt nothing"
