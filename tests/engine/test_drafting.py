"""Catches: drafted rows that see a cousin, miss an ancestor or a committed entry, sit at the wrong
position, leave the window too early or too late, take another node's state, or another row's:
drafts that are merely worse show in no text.

Every tree that the engine drafts is compared with EAGLE-2 written over lists, where each path runs
through the drafter alone, one token at a time, over dense attention.
"""

from __future__ import annotations

import copy

import pytest
import torch
from scripted import ScriptedModel, small_drafter

from eagle4.config import SpeculativeConfig
from eagle4.engine.drafting import EagleDraft
from eagle4.harness import FixedPolicy
from tests.engine.compare import eagle, prompt, shared_target
from tests.engine.test_caches import true_features
from tests.tree.test_grow_prune import nodes_of, reference_pool, reference_tree


class PathLaw:
    """Children of a path after a committed text, from a drafter that runs the path alone."""

    def __init__(self, drafter, features: torch.Tensor, ids: torch.Tensor, top_k: int):
        self.drafter, self.top_k = drafter, top_k
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        states: dict[tuple[int, ...], tuple] = {}
        out = None
        for position in range(len(ids) - 1):
            fused = drafter.fuse(features[position : position + 1])
            out = self.run(fused, int(ids[position + 1]), position, keys, values)
        states[()] = (out, keys, values)
        self.states, self.first = states, len(ids) - 1

    def run(self, state, token: int, position: int, keys: list, values: list):
        """One row; appends its own key and value."""
        window = self.drafter.config.sliding_window or position + 1

        def attend(query, key, value):
            keys.append(key[0])
            values.append(value[0])
            groups = query.shape[1] // key.shape[1]
            seen_k = torch.stack(keys[-window:]).repeat_interleave(groups, dim=1)
            seen_v = torch.stack(values[-window:]).repeat_interleave(groups, dim=1)
            score = torch.einsum("ad,lad->al", query[0], seen_k) * query.shape[-1] ** -0.5
            return torch.einsum("al,lad->ad", score.softmax(-1), seen_v)[None]

        return self.drafter(state, torch.tensor([token]), torch.tensor([position]), attend)

    def __call__(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        if path not in self.states:
            self(path[:-1])
            out, keys, values = self.states[path[:-1]]
            keys, values = list(keys), list(values)
            position = self.first + len(path) - 1
            self.states[path] = (
                self.run(out.state_RH, path[-1], position, keys, values),
                keys,
                values,
            )
        found = self.drafter.propose(self.states[path][0].head_RH, self.top_k)
        return list(zip(found.token_RK[0].tolist(), found.logp_RK[0].tolist(), strict=True))


class Compared:
    """The engine's draft; every tree is compared with the reference."""

    def __init__(self, target, drafter, config: SpeculativeConfig):
        self.target, self.drafter = target, drafter
        self.draft = EagleDraft(drafter, FixedPolicy(config))
        self.compared = 0

    def __call__(self, state, sequences, plan, depth_limit, stats):
        tree = self.draft(state, sequences, plan, depth_limit, stats)
        top_k = min(plan.top_k, self.drafter.num_proposable)
        for b, sequence in enumerate(sequences):
            ids = state.tokens(sequence)
            features = true_features(self.target, self.drafter.config.tap_layers, ids)
            law = PathLaw(self.drafter, features, ids, top_k)
            limit = min(depth_limit[b], plan.max_depth)
            pool = reference_pool(law, plan.max_depth)
            wanted = reference_tree(pool, plan.max_nodes, limit)
            mine = nodes_of(tree, b)
            assert [node.path for node in mine] == [node.path for node in wanted]
            scores = [torch.tensor([n.score for n in nodes]) for nodes in (mine, wanted)]
            torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3)
            self.compared += len(mine)
        return tree


@pytest.mark.parametrize(
    ("lengths", "config", "switches"),
    [
        ([7], dict(max_depth=4, top_k=3, max_nodes=30), {}),
        ([7, 2, 5, 3], dict(max_depth=6, top_k=2, max_nodes=5), {}),
        ([4, 9, 1], dict(max_depth=6, mode="chain"), {"eh_proj": False, "norm_output": False}),
        ([9, 3], dict(max_depth=4, top_k=3, max_nodes=20), {"sliding_window": 5}),
        ([6], dict(max_depth=3, top_k=4, max_nodes=40), {"use_rope": False}),
        ([6], dict(max_depth=3, top_k=4, max_nodes=12), {"candidate_rank": 0, "own_lm_head": True}),
        ([5], dict(max_depth=3, top_k=6, max_nodes=12), {"num_candidates": 3}),
    ],
    ids=str,
)
def test_every_tree_equals_drafting_path_by_path(lengths, config, switches):
    target = shared_target()
    drafter = small_drafter(target, **switches)
    with torch.no_grad():
        # Surer of some tokens than a random drafter is: rows saturate at different depths.
        drafter.norm.weight.mul_(3)
    model = ScriptedModel(target, None, drafter)
    # A copy, because the target itself is busy while the engine runs.
    model.draft = Compared(copy.deepcopy(target), drafter, SpeculativeConfig(**config))
    eagle(model, prompt(lengths, extra=1), max_new_tokens=7, speculative=config)
    assert not model.last_speculation.fallbacks, model.last_speculation.fallbacks
    assert model.draft.compared > 10
