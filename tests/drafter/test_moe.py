"""Catches: experts that see other rows than the router chose, weights with the bias in them, a bias
that moves towards the load, a grouped product that mixes groups, a MoE drafter that does not begin
as its dense part or does not survive a file."""

import pytest
import torch
from tiny import tiny_llama

from eagle4.config import Eagle4Config
from eagle4.drafter import Eagle4Drafter
from eagle4.drafter.moe import DraftExperts, _gathered_product, grouped_product

HIDDEN = 16


def config(**overrides):
    values = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    values |= {"hidden_size": HIDDEN, "num_attention_heads": 2, "intermediate_size": 24}
    return Eagle4Config(**{**values, **overrides})


def experts(**overrides):
    torch.manual_seed(0)
    found = DraftExperts(config(**overrides))
    for param in found.parameters():
        torch.nn.init.normal_(param, std=0.5)
    return found


@pytest.mark.parametrize("normalised", [True, False])
def test_every_row_gets_its_experts(normalised):
    moe = experts(norm_topk_prob=normalised, routed_scaling_factor=1.5)
    moe.gate.e_score_correction_bias[3] = 0.4
    rows = torch.randn(5, 4, HIDDEN)
    found = moe(rows)
    for index in [(0, 0), (2, 3), (4, 1)]:
        row = rows[index]
        score = (moe.gate.weight @ row).sigmoid()
        chosen = (score + moe.gate.e_score_correction_bias).topk(2).indices
        weight = score[chosen] / (score[chosen].sum() if normalised else 1) * 1.5
        out = torch.zeros(HIDDEN)
        for expert, w in zip(chosen, weight, strict=True):
            gate, up = (row @ moe.experts.gate_up_proj[expert]).chunk(2)
            out += w * ((torch.nn.functional.silu(gate) * up) @ moe.experts.down_proj[expert])
        torch.testing.assert_close(found[index], out, rtol=1e-4, atol=1e-5)


def test_grouped_products_with_empty_groups():
    rows, weight = torch.randn(7, 4), torch.randn(4, 4, 3)
    ends = torch.tensor([0, 3, 3, 7])
    wanted = torch.cat([rows[:3] @ weight[1], rows[3:] @ weight[3]])
    for product in (grouped_product, _gathered_product):
        torch.testing.assert_close(product(rows, weight, ends), wanted)


def test_the_bias_moves_against_the_load_and_balances():
    moe = experts()
    rows = torch.randn(512, HIDDEN) + 0.7
    ratios = []
    for _ in range(400):
        moe(rows)
        load = moe.gate.take_load()
        assert load.sum() == 2 * len(rows)
        ratios.append(float(load.max() / load.mean()))
        moe.gate.balance(load, 1e-2)
    assert ratios[0] > 1.5 and ratios[-1] < 1.2
    with torch.no_grad():
        moe(rows)
    assert moe.gate.take_load().sum() == 0, "serving counts nothing"


@pytest.mark.parametrize("moe_norm", [True, False])
def test_a_new_moe_drafter_is_its_dense_part(moe_norm):
    target = tiny_llama(hidden=HIDDEN, layers=7)
    sizes = {"candidate_rank": 4, "num_candidates": 8}
    torch.manual_seed(0)
    dense = Eagle4Drafter(Eagle4Config.for_target(target.config, **sizes))
    moe = Eagle4Drafter(
        Eagle4Config.for_target(target.config, **sizes, num_experts=3, moe_norm=moe_norm)
    )
    missing = moe.load_state_dict(dense.state_dict(), strict=False).missing_keys
    assert missing and all(name.startswith("layers.0.moe") for name in missing)

    def run(drafter):
        drafter.bind(target.get_input_embeddings(), target.lm_head)
        state = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
        position = torch.tensor([4, 5, 6])
        return drafter(state, position, position, lambda q, k, v: q).head_RH

    torch.testing.assert_close(run(dense), run(moe))


def test_files_keep_everything(tmp_path):
    target = tiny_llama(hidden=HIDDEN, layers=7)
    made = Eagle4Config.for_target(
        target.config, candidate_rank=4, num_candidates=8, num_experts=3, routed_scaling_factor=2.5
    )
    drafter = Eagle4Drafter(made)
    drafter.layers[0].moe.gate.e_score_correction_bias += torch.tensor([0.1, -0.2, 0.0])
    drafter.save_pretrained(tmp_path)
    loaded = Eagle4Drafter.from_pretrained(tmp_path)
    assert loaded.config == made
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_experts_per_tok": 7}, "exceeds num_experts"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
        ({"moe_norm": 1}, "moe_norm"),
        ({"num_experts": -1}, "num_experts"),
    ],
)
def test_impossible_structures_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        config(**wrong)
