"""Catches: a configuration switch without effect, a candidate head that changes the law it
reports, frequencies that lose precision in bf16, weights re-initialised by Transformers.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from eagle4.config import Eagle4Config
from eagle4.drafter import Eagle4Drafter
from eagle4.drafter.head import propose_candidates, propose_full
from tests.drafter.drafter_files import HIDDEN, VOCAB
from tests.drafter.reference import Lender


def build(**overrides) -> Eagle4Drafter:
    values = dict(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        vocab_size=VOCAB,
        num_target_layers=9,
        candidate_rank=0,
    )
    torch.manual_seed(0)
    drafter = Eagle4Drafter(Eagle4Config(**{**values, **overrides})).eval()
    generator = torch.Generator().manual_seed(1)
    for name, value in sorted(drafter.state_dict().items()):
        if value.is_floating_point():
            # By name, so that a weight that two structures share is the same in both.
            generator.manual_seed(sum(name.encode()))
            value.copy_(torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.5)
            if "norm" in name:
                value.add_(1)
    return drafter


@pytest.mark.parametrize(
    ("switch", "is_seen_in_weights"),
    [
        ({"fc_norm": False}, True),
        ({"eh_proj": False}, True),
        ({"attn_norm": False}, True),
        ({"own_embed_tokens": True}, True),
        ({"attention_bias": True}, True),
        ({"mlp_bias": True}, True),
        ({"use_rope": False}, False),
        ({"rope_parameters": {"rope_theta": 10.0}}, False),
        ({"hidden_act": "gelu"}, False),
        ({"rms_norm_eps": 0.5}, False),
        ({"norm_output": False}, False),
    ],
    ids=str,
)
def test_every_structural_switch_changes_what_is_computed(switch, is_seen_in_weights):
    plain, other = build(), build(**switch)
    lender = Lender()
    (before, before_next), (after, after_next) = lender.run(plain), lender.run(other)
    assert not torch.allclose(before_next.head_RH, after_next.head_RH, atol=1e-3)
    assert not torch.allclose(before.state_RH, after.state_RH, atol=1e-3)
    assert (set(plain.state_dict()) != set(other.state_dict())) == is_seen_in_weights


@pytest.mark.parametrize(
    ("switch", "change"),
    [
        ({"candidate_rank": 6}, {"efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"}),
        ({"own_lm_head": True}, {"lm_head.weight"}),
        ({"own_lm_head": True, "draft_vocab_size": 20}, {"lm_head.weight", "d2t", "t2d"}),
    ],
    ids=str,
)
def test_every_head_switch_changes_the_weights_and_the_proposals(switch, change):
    plain, other = build(), build(**switch)
    assert set(other.state_dict()) - set(plain.state_dict()) == change
    head = Lender().run(plain)[0].head_RH
    Lender().run(other)
    kept = build(candidate_rank=6, num_candidates=3) if "candidate_rank" in switch else other
    Lender().run(kept)
    with torch.no_grad():
        assert not plain.propose(head, 3).logp_RK.equal(kept.propose(head, 3).logp_RK)


def test_norm_output_hands_the_normalised_state_on():
    first, _ = Lender().run(build(norm_output=True))
    assert first.state_RH is first.head_RH
    raw, _ = Lender().run(build(norm_output=False))
    assert raw.head_RH.equal(first.head_RH) and not raw.state_RH.equal(raw.head_RH)


def test_the_sliding_window_is_stored_for_attention():
    assert build(sliding_window=7).config.sliding_window == 7
    assert build(sliding_window=None).config.sliding_window is None


def test_a_drafter_that_borrows_says_so_until_it_is_bound():
    drafter = build()
    with pytest.raises(ValueError, match="borrows"):
        drafter.propose(torch.zeros(1, HIDDEN), 1)
    lender = Lender()
    assert drafter.bind(lender.embed_tokens, lender.lm_head).head is lender.lm_head
    assert not any("borrowed" in name for name in drafter.state_dict())


# -- candidate head ------------------------------------------------------------------------------


def linear(rows: int, columns: int, seed: int) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    generator = torch.Generator().manual_seed(seed)
    layer.weight.data = torch.randn(rows, columns, generator=generator)
    return layer


@pytest.fixture
def heads():
    """(full head, down, up, hidden rows)."""
    hidden = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(8))
    return linear(VOCAB, HIDDEN, 1), linear(6, HIDDEN, 2), linear(VOCAB, 6, 3), hidden


@torch.no_grad()
def test_all_tokens_as_candidates_equal_the_full_head(heads):
    full, down, up, hidden = heads
    for count in (VOCAB, VOCAB + 5):
        found = propose_candidates(full, down, up, hidden, count, 7)
        expected = propose_full(full, hidden, 7)
        assert found.token_RK.equal(expected.token_RK)
        torch.testing.assert_close(found.logp_RK, expected.logp_RK)


@torch.no_grad()
def test_reported_probabilities_are_the_softmax_over_the_candidates(heads):
    full, down, up, hidden = heads
    found = propose_candidates(full, down, up, hidden, 10, 10)
    chosen = (hidden @ down.weight.T @ up.weight.T).topk(10).indices
    assert found.token_RK.sort().values.equal(chosen.sort().values)
    torch.testing.assert_close(found.logp_RK.exp().sum(-1), torch.ones(9))
    logits = (hidden @ full.weight.T).gather(1, found.token_RK)
    torch.testing.assert_close(found.logp_RK, logits.log_softmax(-1))
    assert found.logp_RK.diff(dim=-1).le(0).all()
    fewer = propose_candidates(full, down, up, hidden, 10, 3)
    assert fewer.token_RK.equal(found.token_RK[:, :3])
    assert fewer.logp_RK.equal(found.logp_RK[:, :3])


@torch.no_grad()
def test_a_biased_head_keeps_its_bias_for_the_candidates(heads):
    full, down, up, hidden = heads
    full.bias = nn.Parameter(torch.linspace(-3, 3, VOCAB))
    found = propose_candidates(full, down, up, hidden, VOCAB, 4)
    torch.testing.assert_close(found.logp_RK, propose_full(full, hidden, 4).logp_RK)


@torch.no_grad()
def test_ties_propose_distinct_tokens_of_equal_probability(heads):
    full, down, up, hidden = heads
    full.weight.fill_(0.5)
    for found in (
        propose_full(full, hidden, 6),
        propose_candidates(full, down, up, hidden, 6, 6),
    ):
        assert all(len(set(row)) == 6 for row in found.token_RK.tolist())
        assert found.logp_RK.eq(found.logp_RK[:, :1]).all()


@torch.no_grad()
def test_more_children_than_tokens_give_every_token_once(heads):
    full, down, up, hidden = heads
    assert propose_full(full, hidden, VOCAB + 3).token_RK.shape == (9, VOCAB)
    few = propose_candidates(full, down, up, hidden, 5, 99)
    assert few.token_RK.shape == (9, 5) and few.logp_RK.dtype == torch.float32
    assert propose_full(full, hidden[:0], 4).token_RK.shape == (0, 4)


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ({}, VOCAB),
        ({"candidate_rank": 4, "num_candidates": 9}, 9),
        ({"candidate_rank": 4, "num_candidates": 999}, VOCAB),
        ({"draft_vocab_size": 20, "own_lm_head": True}, 20),
    ],
    ids=str,
)
def test_num_proposable_is_what_propose_returns_at_most(switch, expected):
    drafter = build(**switch)
    head = Lender().run(drafter)[0].head_RH
    with torch.no_grad():
        assert drafter.num_proposable == drafter.propose(head, 10**6).token_RK.shape[1] == expected


# -- what Transformers and torch do to modules ---------------------------------------------------


@pytest.mark.parametrize("move", ["bfloat16", "half", "deepcopy", "meta", "double"])
def test_rotary_frequencies_stay_exact(move):
    drafter = build(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1234.5})
    exact = 1234.5 ** (-torch.arange(0, 8, 2) / 8) / 3
    moved = {
        "bfloat16": lambda: drafter.to(torch.bfloat16),
        "half": lambda: drafter.half().float(),
        "deepcopy": lambda: copy.deepcopy(drafter).bfloat16(),
        "meta": lambda: drafter.to("meta").to_empty(device="cpu"),
        "double": lambda: drafter.double(),
    }[move]()
    for name in ("inv_freq", "original_inv_freq"):
        found = getattr(moved._rotary, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)
    assert not any("freq" in name for name in moved.state_dict())


class PairConfig(PreTrainedConfig):
    model_type = "pair_for_test"
    sub_configs = {"drafter_config": Eagle4Config}

    def __init__(self, drafter_config=None, **kwargs):
        is_dict = isinstance(drafter_config, dict)
        self.drafter_config = Eagle4Config(**drafter_config) if is_dict else drafter_config
        super().__init__(**kwargs)


class Pair(PreTrainedModel):
    config_class = PairConfig

    def __init__(self, config):
        super().__init__(config)
        self.drafter = Eagle4Drafter(config.drafter_config)
        self.post_init()


def test_a_drafter_inside_another_model_survives_transformers_own_loading(tmp_path):
    inner = build(candidate_rank=4, own_embed_tokens=True)
    pair = Pair(PairConfig(inner.config))
    pair.drafter.load_state_dict(inner.state_dict())
    pair.save_pretrained(tmp_path)
    loaded = Pair.from_pretrained(tmp_path).drafter
    assert loaded.config == inner.config
    for name, value in inner.state_dict().items():
        assert loaded.state_dict()[name].equal(value)
    assert loaded._rotary.inv_freq.equal(inner._rotary.inv_freq)
    for before, after in zip(Lender().run(inner), Lender().run(loaded), strict=True):
        assert before.head_RH.equal(after.head_RH)
