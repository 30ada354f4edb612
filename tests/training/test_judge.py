"""Can catch: a simulated accept length that serving does not reach, a best checkpoint that is not
the best, decoding that changes the drafter or its target, prompts that give the answer away."""

import dataclasses
import json

import pytest
import torch

from eagle4.drafter.model import Eagle4Drafter
from eagle4.training.judge import EngineDecode, Measured, held_out_prompts
from eagle4.training.trainer import Trainer
from tests.training.small import VOCAB, tiny_drafter, tiny_store
from tests.training.test_trainer import QUICK


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    return tiny_store(tmp_path_factory.mktemp("store"), target, num_sequences=12, length=64)


def test_prompts_end_where_supervision_begins(store):
    prompts = held_out_prompts(store, range(12), 3)
    assert len(prompts) == 3
    for index, prompt in zip((0, 4, 8), prompts, strict=True):
        ids, mask = store.field(index, "ids"), store.field(index, "mask")
        assert prompt == ids[~mask].tolist()


def test_overfitting_one_sample_reaches_depth_plus_one(tmp_path, target):
    """Trap J1: the engine accepts everything that training has learned, within 300 steps."""
    store = tiny_store(tmp_path / "store", target, num_sequences=1, length=48)
    config = dataclasses.replace(
        QUICK, steps=150, held_out_fraction=0.0, num_anchors=16, num_depths=4, lr=1e-2
    )
    trainer = Trainer(tiny_drafter(target), store, tmp_path / "run", config)
    trainer.train()
    prompts = held_out_prompts(store, [0], 1)
    decode = EngineDecode(target, prompts, max_new_tokens=39, depth=4)
    assert decode(trainer.drafter).accept_length > 4.5
    assert decode(tiny_drafter(target)).accept_length < 2.0


def test_simulated_equals_measured_within_a_tenth(tmp_path, target):
    """Greedy text, whole answers: the walk through it is what the engine does."""
    store = tiny_store(tmp_path / "store", target, num_sequences=10, length=56)
    config = dataclasses.replace(
        QUICK, steps=60, lr=1e-2, num_anchors=44, batch_size=4, num_depths=4, eval_runs=64,
        eval_every=1000, held_out_fraction=0.5, ema_decay=0.0,
    )  # fmt: skip
    trainer = Trainer(tiny_drafter(target), store, tmp_path / "run", config)
    trainer.held_out = list(range(10))  # some that it knows: lengths from 1 to depth + 1
    prompts = held_out_prompts(store, trainer.held_out, 99)
    trainer.judge.decode = EngineDecode(target, prompts, max_new_tokens=44, depth=4)
    metrics = trainer.train()
    assert 1.5 < metrics["tau_measured"] < 4.9
    assert metrics["tau_measured"] == pytest.approx(metrics["tau_walk"], rel=0.1)


@pytest.mark.parametrize(("error", "kept"), [(0.0, 0), (0.3, 0), (0.6, 2)])
def test_the_last_within_an_error_of_the_best_is_kept(tmp_path, target, store, error, kept):
    scores = iter([2.5, 2.0, 2.0])
    trainer = Trainer(tiny_drafter(target), store, tmp_path, QUICK)
    seen = []

    def decode(drafter):
        seen.append(drafter.fc.weight.detach().clone())
        return Measured(next(scores), error)

    trainer.judge.decode = decode
    trainer.train()
    assert trainer.state.best == 2.5
    best = Eagle4Drafter.from_pretrained(tmp_path / "best")
    assert torch.equal(best.fc.weight, seen[kept])
    assert trainer.state.kept == (3, 6, 6)[kept]  # the end is judged once more
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    measured = [r["held_out"]["tau_measured"] for r in records if "held_out" in r]
    assert measured == [2.5, 2.0, 2.0]


@pytest.mark.parametrize(("scores", "kept"), [((2.5, 2.4, 2.4, 2.4), 0), ((2.5, 2.6, 2.5, 2.2), 6)])
def test_what_a_continued_run_began_with_gives_way_to_longer_results_only(
    tmp_path, target, store, scores, kept
):
    left = iter(scores)
    trainer = Trainer(tiny_drafter(target), store, tmp_path, QUICK, is_continued=True)
    start = trainer.drafter.fc.weight.detach().clone()
    trainer.judge.decode = lambda drafter: Measured(next(left), 0.15)
    trainer.train()
    assert trainer.state.kept == kept and trainer.state.best == max(scores)
    best = Eagle4Drafter.from_pretrained(tmp_path / "best")
    assert torch.equal(best.fc.weight, start) == (kept == 0)


def test_decoding_leaves_everything_as_it_was(target):
    drafter = tiny_drafter(target, candidate_rank=4, num_candidates=8)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    decode = EngineDecode(target, [[3, 4, 5], [6]], max_new_tokens=8, depth=3)
    lent = drafter.target_head
    found = decode(drafter)
    assert found == decode(drafter) and found.accept_length >= 1.0 and found.error >= 0
    assert all(torch.equal(before[name], v) for name, v in drafter.state_dict().items())
    assert drafter.target_head is lent and target.lm_head.weight.shape[0] == VOCAB
    with pytest.raises(ValueError, match="at least one prompt"):
        EngineDecode(target, [], 8, 3)
