"""Can catch: features that differ from what the disk holds, a run that differs from one on stored
features, data of another target, a head that the logits do not come from."""

import json

import pytest
import torch

from eagle4.training.extract import build_store
from eagle4.training.features import FeatureStore, FeatureWriter, target_identity
from eagle4.training.online import OnlineFeatures
from eagle4.training.recipe import train_drafter
from eagle4.training.sequences import training_sequences
from eagle4.training.settings import CandidateConfig, TrainConfig
from tests.training.small import TAPS, VOCAB, tiny_drafter, tiny_target

CONFIG = TrainConfig(
    steps=3, batch_size=2, num_anchors=6, num_depths=2, decode_prompts=0, precision="bfloat16"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(target, response file, store on disk, store that computes)."""
    folder, target = tmp_path_factory.mktemp("data"), tiny_target()
    generator, responses = torch.Generator().manual_seed(2), folder / "responses.jsonl"
    with open(responses, "w") as file:
        for i in range(6):
            ids = torch.randint(1, VOCAB, (20 + i,), generator=generator).tolist()
            file.write(json.dumps({"id": i, "prompt_ids": ids[:6], "response_ids": ids[6:]}) + "\n")
    identity = target_identity(target.config, TAPS, None)
    with FeatureWriter(folder / "features", identity) as writer:
        build_store(target, TAPS, writer, training_sequences(responses))
    stored = FeatureStore(folder / "features", expect=identity)
    return target, responses, stored, OnlineFeatures(responses, identity, target)


def test_features_equal_the_stored_ones(pair):
    _, _, stored, online = pair
    assert len(stored) == len(online) == 6
    for key in ("target", "num_sequences", "num_tokens", "num_supervised"):
        assert stored.manifest[key] == online.manifest[key]
    for i in range(6):
        with torch.autocast("cpu", torch.bfloat16):  # must not reach the target
            found = online[i]
        for name, value in stored[i]._asdict().items():
            assert torch.equal(value, getattr(found, name)), name
            assert torch.equal(value, online.field(i, name)), name
        assert stored.info(i) == online.info(i)


def test_training_is_the_same_bit_for_bit(pair, tmp_path):
    target, _, stored, online = pair
    form = tiny_drafter(target, candidate_rank=8, num_candidates=16).config
    found = []
    for name, store in (("stored", stored.folder), ("online", online)):
        drafter, metrics = train_drafter(
            *(target, None, store, tmp_path / name),
            drafter_config=form,
            config=CONFIG,
            candidates=CandidateConfig(steps=2, num_runs=4, rows=8),
        )
        metrics.pop("train_seconds")
        found.append((drafter.state_dict(), metrics))
    assert found[0][1] == found[1][1]
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name]), name


def test_unfit_data_is_refused(pair, tmp_path):
    target, responses, _, online = pair
    other = {**online.manifest["target"], "hidden_size": 7}
    with pytest.raises(ValueError, match="hidden_size"):
        config = tiny_drafter(target).config
        store = OnlineFeatures(responses, other, target)
        train_drafter(target, None, store, tmp_path / "run", drafter_config=config, config=CONFIG)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="empty.jsonl holds no sequences"):
        OnlineFeatures(tmp_path / "empty.jsonl", online.manifest["target"], target)
