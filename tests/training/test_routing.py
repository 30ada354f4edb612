"""Can catch: load that is not summed over depths and micro-batches, a bias that a checkpoint
forgets, an auxiliary loss without a gradient, a MoE drafter that does not train."""

import dataclasses

import pytest
import torch

from eagle4.training.routing import auxiliary_loss, routers
from eagle4.training.trainer import Trainer
from tests.training.small import tiny_drafter
from tests.training.test_trainer import QUICK

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def test_load_covers_all_depths_and_parts(tmp_path, target, store, monkeypatch):
    config = dataclasses.replace(QUICK, accumulation=2)
    trainer = Trainer(tiny_drafter(target, **MOE), store, tmp_path, config)
    (router,) = routers(trainer.drafter)
    loads = []
    monkeypatch.setattr(router, "balance", lambda load_E, rate: loads.append(load_E))
    logged = trainer.step()
    rows = config.batch_size * config.num_depths * config.num_anchors
    assert loads[0].sum() == 2 * rows
    assert logged["expert_load"] == pytest.approx(float(loads[0].max() / loads[0].mean()))


def test_training_moves_experts(tmp_path, target, store):
    config = dataclasses.replace(QUICK, steps=12)
    drafter = tiny_drafter(target, **MOE)
    before = drafter.layers[0].moe.experts.down_proj.clone()
    trainer = Trainer(drafter, store, tmp_path, config)
    logged = [trainer.step() for _ in range(12)]
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert not torch.equal(before, drafter.layers[0].moe.experts.down_proj)
    assert all(1.0 <= step["expert_load"] <= 4.0 for step in logged)


def test_the_bias_is_resumed(tmp_path, target, store):
    straight = Trainer(tiny_drafter(target, **MOE), store, tmp_path / "a", QUICK)
    straight.train()
    first = Trainer(tiny_drafter(target, **MOE), store, tmp_path / "b", QUICK)
    for _ in range(3):
        first.step()
    first.save()
    second = Trainer(tiny_drafter(target, **MOE), store, tmp_path / "b", QUICK)
    second.train()
    biases = [routers(t.drafter)[0].e_score_correction_bias for t in (straight, second)]
    assert biases[0].abs().sum() > 0 and torch.equal(*biases)


def test_the_auxiliary_loss_is_least_at_balance(tmp_path, target, store):
    config = dataclasses.replace(QUICK, balance_loss=0.1)
    drafter = tiny_drafter(target, **MOE)
    trainer = Trainer(drafter, store, tmp_path, config)
    trainer.step()
    (router,) = routers(drafter)
    router.loads = [torch.full((4,), 3)]
    router.balance_terms = [torch.full((4,), 0.25)]
    assert float(auxiliary_loss(drafter, torch.ones(3))) == pytest.approx(1.0)
    router.loads = [torch.tensor([2, 0, 0, 0]), torch.tensor([4, 0, 0, 0])]
    router.balance_terms = [torch.tensor([0.7, 0.1, 0.1, 0.1], requires_grad=True)]
    loss = auxiliary_loss(drafter, torch.ones(3))
    assert loss.item() == pytest.approx(2.8) and loss.requires_grad


def test_a_dense_drafter_has_no_routers(target):
    assert routers(tiny_drafter(target)) == []
