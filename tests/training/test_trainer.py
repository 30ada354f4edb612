"""Can catch: a drafter that trains but does not accept, a resume that diverges, data order that is
lost or drops sequences, frozen weights that move, metrics outside their range."""

import copy
import dataclasses
import json

import pytest
import torch

from eagle4.drafter.model import Eagle4Drafter
from eagle4.training.features import FeatureStore
from eagle4.training.metrics import Tally
from eagle4.training.runs import Position, RunSampler, split_held_out, supervised_segments
from eagle4.training.trainer import TrainConfig, Trainer
from tests.training.small import tiny_drafter, tiny_store

QUICK = TrainConfig(
    steps=6,
    batch_size=2,
    num_anchors=8,
    num_depths=3,
    num_frequent=16,
    num_sampled=8,
    full_vocab_fraction=0.34,
    held_out_fraction=0.3,
    eval_every=3,
    eval_depths=4,
    checkpoint_every=2,
    lr=5e-3,
    precision="float32",
)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_overfits_one_sequence(tmp_path, target, optimizer):
    """A text that it was trained on is drafted right at every depth (trap J1)."""
    store = tiny_store(tmp_path / "store", target, num_sequences=1, length=48)
    config = dataclasses.replace(
        QUICK, steps=120, optimizer=optimizer, num_anchors=16, lr=1e-2, eval_every=1000
    )
    trainer = Trainer(tiny_drafter(target), store, tmp_path / "run", config)
    before = target.lm_head.weight.clone()
    trainer.held_out = [0]
    metrics = trainer.train()
    assert sum(metrics["top1"][:3]) / 3 > 0.95, metrics
    assert torch.equal(before, target.lm_head.weight)


def test_the_target_gets_no_gradient(tmp_path, target, store):
    """A borrowed embedding would cost a [V, H] gradient per depth and could move the target."""
    target = copy.deepcopy(target).requires_grad_(True)
    Trainer(tiny_drafter(target), store, tmp_path, QUICK).step()
    assert all(param.grad is None for param in target.parameters())


def test_bf16_products_keep_fp32_weights_and_nearly_the_loss(tmp_path, target, store):
    losses = {}
    for precision in ("float32", "bfloat16"):
        config = dataclasses.replace(QUICK, precision=precision)
        torch.manual_seed(0)
        trainer = Trainer(tiny_drafter(target), store, tmp_path / precision, config)
        losses[precision] = [trainer.step()["loss"] for _ in range(4)]
        assert {param.dtype for param in trainer.params.values()} == {torch.float32}
    assert losses["bfloat16"] != losses["float32"]  # the switch does something
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=2e-2)


LOSSES = [("muon", 0.1, "forward_kl"), ("adamw", 0.0, "lk_lambda")]


@pytest.mark.parametrize(("optimizer", "noise", "loss"), LOSSES)
def test_resumed_run_is_bit_identical(tmp_path, target, store, optimizer, noise, loss):
    config = dataclasses.replace(QUICK, optimizer=optimizer, feature_noise=noise, loss=loss)
    straight = Trainer(tiny_drafter(target), store, tmp_path / "a", config)
    straight.train()

    broken = Trainer(tiny_drafter(target), store, tmp_path / "b", config)
    plain_step, steps = broken.step, iter(range(3))

    def step():
        # stops after three steps, one beyond the last checkpoint
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return plain_step()

    broken.step = step
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = Trainer(tiny_drafter(target), store, tmp_path / "b", config)
    resumed.train()
    assert resumed.state.step == straight.state.step == config.steps
    for name, param in straight.params.items():
        assert torch.equal(param, resumed.params[name]), name
        assert torch.equal(straight.ema[name], resumed.ema[name]), name


def test_changed_settings_do_not_resume(tmp_path, target, store):
    Trainer(tiny_drafter(target), store, tmp_path, QUICK).train()
    noisy = dataclasses.replace(QUICK, feature_noise=0.1)
    with pytest.raises(ValueError, match="feature_noise: 0.0 -> 0.1"):
        Trainer(tiny_drafter(target), store, tmp_path, noisy).train()
    other = Trainer(tiny_drafter(target), store, tmp_path, dataclasses.replace(QUICK, lr=1.0))
    with pytest.raises(ValueError, match="lr: 0.005 -> 1.0"):
        other.train()


def test_writes_log_and_best_drafter(tmp_path, target, store):
    Trainer(tiny_drafter(target), store, tmp_path, QUICK).train()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum("loss" in record for record in records) == QUICK.steps
    held_out = [record["held_out"] for record in records if "held_out" in record]
    assert len(held_out) == 3 and len(held_out[0]["top1"]) == QUICK.eval_depths
    best = Eagle4Drafter.from_pretrained(tmp_path / "best")
    assert best.config.tap_layers == [0, 1, 2]


def test_non_finite_steps_are_skipped_then_fatal(tmp_path, target, store):
    class Poisoned(FeatureStore):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            return found._replace(taps=found.taps * float("nan"))

    config = dataclasses.replace(QUICK, max_skipped=3, eval_every=100)
    trainer = Trainer(tiny_drafter(target), Poisoned(store.folder), tmp_path, config)
    before = {name: param.clone() for name, param in trainer.params.items()}
    with pytest.raises(RuntimeError, match="not finite"):
        trainer.train()
    assert trainer.state.skipped == 4
    assert all(torch.equal(before[name], param) for name, param in trainer.params.items())


def test_every_supervised_slot_is_visited_and_order_is_reproducible(store):
    sequences = list(range(len(store)))
    first, second = (RunSampler(store, sequences, 8, 2, seed=5) for _ in range(2))
    seen: dict[int, set[int]] = {index: set() for index in sequences}
    position, other = Position(0, 0), Position(0, 0)
    while position.epoch < 12:
        batch, position = first.next(position)
        again, other = second.next(other)
        assert batch == again
        for index, start in batch:
            seen[index].update(range(start, start + 8))
    for index in sequences:
        for start, end in supervised_segments(store[index].mask):
            assert set(range(start, end)) <= seen[index]
    assert first.epoch(0) != first.epoch(1)


def test_segments_follow_the_mask():
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1, 1]).bool()
    assert supervised_segments(mask) == [(1, 3), (4, 7)]


def test_held_out_sequences_keep_their_side_when_the_store_grows():
    small, large = split_held_out(200, 0.05, 0), split_held_out(400, 0.05, 0)
    assert set(small[1]) == {i for i in large[1] if i < 200} and small[1]
    assert sorted(small[0] + small[1]) == list(range(200))
    assert split_held_out(5, 0.0, 0) == ([0, 1, 2, 3, 4], [])
    assert len(split_held_out(2, 1e-6, 0)[1]) == 1


def test_tally_counts_chains_by_hand():
    """Three anchors, two depths: right-right, right-wrong, wrong-right."""
    head = torch.nn.Linear(6, 6, bias=False)
    head.weight.data = torch.eye(6)
    teacher_JH = 9 * torch.eye(6)[[0, 1, 2, 3]]
    student = 9 * torch.eye(6)[torch.tensor([[0, 1, 5], [1, 5, 3]])]
    tally = Tally(2, width=1)
    tally.add(student, teacher_JH, torch.ones(2, 3, dtype=torch.bool), head)
    metrics = tally.result()
    assert metrics["top1"] == pytest.approx([2 / 3, 2 / 3])
    assert metrics["chain"] == pytest.approx([2 / 3, 1 / 3])
    assert metrics["tau_chain"] == pytest.approx(2.0)


@pytest.mark.parametrize("reduced", [False, True])
def test_an_own_head_is_trained(tmp_path, target, store, reduced):
    overrides = {"own_lm_head": True, "eh_proj": False, "norm_output": False, "fc_norm": False}
    drafter = tiny_drafter(target, **overrides, draft_vocab_size=24 if reduced else None)
    if reduced:
        drafter.t2d[:24] = True
    before = drafter.lm_head.weight.clone()
    trainer = Trainer(drafter, store, tmp_path, dataclasses.replace(QUICK, steps=25))
    losses = [trainer.step()["loss"] for _ in range(25)]
    assert sum(losses[-5:]) < sum(losses[:5]) and not torch.equal(before, drafter.lm_head.weight)
    metrics = trainer.judge.evaluate()
    assert 0 <= metrics["top1"][0] <= 1 and metrics["kl"][0] > 0


def test_frozen_parameters_stay(tmp_path, target, store):
    drafter = tiny_drafter(target)
    before = {name: param.clone() for name, param in drafter.named_parameters()}
    config = dataclasses.replace(QUICK, freeze=("fc", "layers.0.mlp"))
    trainer = Trainer(drafter, store, tmp_path, config)
    trainer.step()
    for name, param in drafter.named_parameters():
        is_frozen = name.startswith(("fc.", "fc_norm", "layers.0.mlp"))
        assert torch.equal(before[name], param) == is_frozen, name
    with pytest.raises(ValueError, match="nothing to train"):
        Trainer(drafter, store, tmp_path, dataclasses.replace(QUICK, freeze=("",)))


@pytest.mark.parametrize("change", [{"accumulation": 2}, {"accumulation": 5}, {"recompute": True}])
def test_how_a_step_is_cut_does_not_change_it(tmp_path, target, store, change):
    """Five parts of four runs: one part is empty and only takes part."""
    config = dataclasses.replace(QUICK, batch_size=4)
    found = []
    for i, settings in enumerate(({}, change)):
        drafter = tiny_drafter(target)
        trainer = Trainer(
            drafter, store, tmp_path / str(i), dataclasses.replace(config, **settings)
        )
        logged = [trainer.step() for _ in range(3)]
        found.append((logged, [param.clone() for param in drafter.parameters()]))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["overlap"] == pytest.approx(b["overlap"], rel=1e-5)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"steps": 0}, {"accumulation": 0}, {"ema_decay": 2.0}, {"feature_noise": -1.0}),
        *(
            {"optimizer": "sgd"},
            {"precision": "fp8"},
            {"loss": "l2"},
            {"schedule": "step"},
            {"sharding": "zero"},
        ),
    ],
)
def test_bad_settings_are_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        TrainConfig(**wrong)
