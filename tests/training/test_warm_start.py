"""Can catch: a warm start that forgets a tensor, maps half of a drafter, moves the drafter although
it failed, loses the scale of the taps, the embedding path or the residual, puts a reduced head's
rows on wrong tokens, or does not save training."""

import dataclasses

import pytest
import torch

from eagle4.drafter.model import Eagle4Drafter
from eagle4.training.runs import assemble
from eagle4.training.trainer import Trainer
from eagle4.training.ttt import unroll
from eagle4.training.warm_start import (
    full_head,
    goal_config,
    measure_inputs,
    narrow_projections,
    warm_start,
)
from tests.training.small import HIDDEN, VOCAB, tiny_drafter, tiny_store
from tests.training.test_heads import reduced_drafter
from tests.training.test_trainer import QUICK

EAGLE3 = {"eh_proj": False, "norm_output": False, "fc_norm": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    return tiny_store(tmp_path_factory.mktemp("store"), target, num_sequences=8)


@pytest.fixture(scope="module")
def batches(store):
    return [assemble(store, [(i, 30)], 4, 3) for i in range(len(store))]


def fresh(target, config):
    """A random drafter of some form."""
    torch.manual_seed(5)
    return Eagle4Drafter(config).bind(target.get_input_embeddings(), target.lm_head)


def test_the_same_form_is_copied(target, batches):
    source = tiny_drafter(target, candidate_rank=4, num_candidates=8, num_experts=2)
    drafter = warm_start(fresh(target, source.config), source, batches)
    for name, value in source.state_dict().items():
        assert torch.equal(value, drafter.state_dict()[name]), name
    assert torch.equal(unroll(drafter, batches[0]), unroll(source, batches[0]))


def test_eagle31_keeps_the_scale_of_the_taps(target, batches):
    source = tiny_drafter(target, **EAGLE3)
    config = goal_config(source.config, eh_proj=False, attn_norm=False, candidate_rank=0)
    drafter = warm_start(fresh(target, config), source, batches)
    runs = batches[0]
    a, b = drafter.fuse(runs.feature_NTH), source.fuse(runs.feature_NTH)
    assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.98
    assert float((a.norm() / b.norm()).detach()) == pytest.approx(1.0, abs=0.1)


def explained(wanted, found):
    return 1 - float((wanted - found).square().sum() / wanted.square().sum())


def test_projections_keep_attention_and_residual(target, batches):
    """On measured inputs, weighted by their covariance; the embedding path must survive."""
    source = tiny_drafter(target, **EAGLE3)
    inputs = measure_inputs(source, batches)
    new = narrow_projections(source.state_dict(), inputs, has_norm=True)
    project = new["layers.0.eh_proj.weight"].double()
    assert project.shape == (HIDDEN, 2 * HIDDEN)
    factor = torch.linalg.cholesky(inputs.moment_XX + 1e-9 * torch.eye(2 * HIDDEN))
    shares = []
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        old = source.state_dict()[name].double() @ factor
        shares.append(explained(old, new[name].double() @ project @ factor))
    residual = inputs.cross_HX @ torch.linalg.inv(inputs.moment_XX)
    shares.append(explained(residual @ factor, project @ factor))
    assert min(shares[:3]) > 0.6 and shares[3] > 0.6, shares
    # reading the state alone explains less of what attention read
    blind = source.state_dict()["layers.0.self_attn.q_proj.weight"].double().clone()
    whole = blind @ factor
    blind[:, :HIDDEN] = 0
    assert explained(whole, blind @ factor) < shares[0]


def test_an_eagle4_drafter_keeps_its_form(target):
    source = tiny_drafter(target, use_rope=False, sliding_window=7, attn_norm=False)
    assert goal_config(source.config) == source.config
    assert goal_config(source.config, num_experts=2).sliding_window == 7


def test_a_reduced_head_is_scattered(target):
    source = reduced_drafter(target)
    head = full_head(source)
    assert head.shape == (VOCAB, HIDDEN)
    assert torch.equal(head[[3, 5, 9, 40]], source.lm_head.weight)
    ratio = head[4] / target.lm_head.weight[4]
    assert ratio.std() < 1e-5
    wanted = source.lm_head.weight.norm(dim=1).mean()
    assert float(head[[3, 5, 9, 40]].norm(dim=1).mean()) == pytest.approx(float(wanted))


def test_eagle3_becomes_eagle4_with_everything(target, batches):
    source = reduced_drafter(target, **EAGLE3)
    config = goal_config(source.config, candidate_rank=8, num_candidates=16)
    assert config.fc_norm and config.eh_proj and config.attn_norm and config.norm_output
    assert config.own_lm_head and config.draft_vocab_size is None
    drafter = warm_start(fresh(target, config), source, batches)
    for name in ("fc.weight", "norm.weight", "layers.0.mlp.up_proj.weight"):
        assert torch.equal(drafter.state_dict()[name], source.state_dict()[name])


def test_a_dense_drafter_becomes_a_moe_one_that_does_the_same(target, batches):
    source = tiny_drafter(target)
    config = goal_config(source.config, num_experts=4, candidate_rank=6)
    drafter = warm_start(fresh(target, config), source, batches)
    torch.testing.assert_close(unroll(drafter, batches[0]), unroll(source, batches[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 64}, "intermediate_size: 48 cannot become 64"),
        ({"tap_layers": [0, 2]}, "tap_layers"),
        ({"fc_norm": False}, "fc_norm: True cannot become False"),
        ({"eh_proj": False}, "eh_proj: True cannot become False"),
    ],
)
def test_what_cannot_be_mapped_is_named_and_nothing_moves(target, batches, change, message):
    source = tiny_drafter(target)
    drafter = tiny_drafter(target, **change)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        warm_start(drafter, source, batches)
    assert all(torch.equal(before[name], v) for name, v in drafter.state_dict().items())


def test_a_broken_source_moves_nothing(target, batches):
    source, drafter = tiny_drafter(target), fresh(target, tiny_drafter(target).config)
    source.fc.weight.data[0, 0] = float("nan")
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with pytest.raises(ValueError, match="fc.weight is not finite"):
        warm_start(drafter, source, batches)
    assert all(torch.equal(before[name], v) for name, v in drafter.state_dict().items())


def test_a_warm_start_saves_training(tmp_path, target, store, batches):
    """A trained EAGLE-3 drafter, mapped, begins far below a random drafter's loss."""
    config = dataclasses.replace(QUICK, steps=60, lr=1e-2, num_anchors=12, batch_size=4)
    source = tiny_drafter(target, **EAGLE3, own_lm_head=True)
    source.lm_head.weight.data.copy_(target.lm_head.weight)
    Trainer(source, store, tmp_path / "source", config).train()
    goal = goal_config(source.config, candidate_rank=0)
    mapped = warm_start(fresh(target, goal), source, batches)
    cold = fresh(target, goal)
    cold.lm_head.weight.data.copy_(target.lm_head.weight)
    losses = [
        Trainer(drafter, store, tmp_path / name, config).step()["loss"]
        for name, drafter in (("warm", mapped), ("cold", cold))
    ]
    assert losses[0] < 0.8 * losses[1], losses
