"""Can catch: an update that changes the start, base weights that move, a written drafter that
is not the trained one, an update that does not learn or does not resume."""

import dataclasses

import pytest
import torch

from eagle4.drafter.model import Eagle4Drafter
from eagle4.training.judge import whole_drafter
from eagle4.training.recipe import train_drafter
from eagle4.training.runs import assemble
from eagle4.training.settings import CandidateConfig
from eagle4.training.trainer import Trainer
from eagle4.training.ttt import unroll
from tests.training.small import tiny_drafter
from tests.training.test_trainer import QUICK

CONFIG = dataclasses.replace(QUICK, lora_rank=2, optimizer="adamw")


def trainer_of(target, store, folder, **settings):
    config = dataclasses.replace(CONFIG, **settings)
    return Trainer(tiny_drafter(target), store, folder, config, is_continued=True)


def heads(drafter, store):
    with torch.no_grad():
        return unroll(drafter, assemble(store, [(0, 8), (1, 12)], 6, 3))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_only_the_updates_learn_and_the_merged_drafter_is_the_trained_one(
    tmp_path, target, store, precision
):
    trainer = trainer_of(target, store, tmp_path, precision=precision, steps=30)
    start = tiny_drafter(target).state_dict()
    assert torch.equal(heads(trainer.drafter, store), heads(tiny_drafter(target), store))
    assert all("parametrizations" in name for name in trainer.params)
    losses = [trainer.step()["loss"] for _ in range(30)]
    assert sum(losses[-5:]) < 0.98 * sum(losses[:5])
    for name, value in trainer.drafter.state_dict().items():
        plain = name.replace("parametrizations.weight.original", "weight")
        assert plain not in start or torch.equal(start[plain], value), name
    merged = whole_drafter(trainer.drafter)
    merged.save_pretrained(tmp_path / "merged")
    loaded = Eagle4Drafter.from_pretrained(tmp_path / "merged")
    loaded.bind(target.get_input_embeddings(), target.lm_head)
    assert loaded.state_dict().keys() == start.keys()
    with trainer.autocast():
        assert torch.equal(heads(loaded, store), heads(trainer.drafter, store))
    changed = loaded.layers[0].mlp.up_proj.weight - start["layers.0.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(changed, rtol=1e-3) == CONFIG.lora_rank


def test_resumed_updates_are_bit_identical(tmp_path, target, store):
    straight = trainer_of(target, store, tmp_path / "a")
    straight.train()
    part = trainer_of(target, store, tmp_path / "b")
    for _ in range(3):
        part.step()
    part.save()
    resumed = trainer_of(target, store, tmp_path / "b")
    resumed.train()
    for name, param in straight.params.items():
        assert torch.equal(param, resumed.params[name]), name


def test_the_recipe_writes_a_plain_drafter(tmp_path, target, store):
    init = tiny_drafter(target, candidate_rank=8, num_candidates=16)
    before = {name: value.clone() for name, value in init.state_dict().items()}
    found, _ = train_drafter(
        *(target, None, store, tmp_path),
        config=dataclasses.replace(CONFIG, steps=2, decode_prompts=1, decode_tokens=6),
        candidates=CandidateConfig(init="keep", steps=0, num_runs=2, rows=8),
        init=init,
    )
    loaded = Eagle4Drafter.from_pretrained(tmp_path / "drafter").state_dict()
    assert loaded.keys() == before.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in found.state_dict().items())


def test_unfit_settings_are_refused(tmp_path, target, store):
    with pytest.raises(ValueError, match="start from one"):
        Trainer(tiny_drafter(target), store, tmp_path, CONFIG)
    for wrong in ({"recompute": True}, {"sharding": "shard"}, {"lora_rank": -1}):
        with pytest.raises(ValueError, match="lora_rank"):
            dataclasses.replace(CONFIG, **wrong)
