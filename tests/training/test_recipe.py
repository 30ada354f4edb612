"""Can catch: a recipe whose parts do not fit: text to features to a drafter folder that loads."""

import json

import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer

from eagle4.config import Eagle4Config
from eagle4.drafter.model import Eagle4Drafter
from eagle4.drafter.pairing import tokenizer_fingerprint
from eagle4.training import FeatureWriter, TrainConfig, train_drafter
from eagle4.training.answers import regenerate
from eagle4.training.extract import build_store
from eagle4.training.features import target_identity
from eagle4.training.prompts import Prompt
from eagle4.training.sequences import training_sequences
from eagle4.training.settings import CandidateConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_prompts_to_a_drafter(tmp_path, dtype):
    target, tokenizer = tiny_llama(hidden=32).to(dtype), tiny_tokenizer()
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(i), torch.randint(7, 90, (6,), generator=generator).tolist(), "test")
        for i in range(8)
    ]
    regenerate(target, tokenizer, prompts, tmp_path / "rows.jsonl", max_new_tokens=24)
    config = Eagle4Config.for_target(target.config, candidate_rank=8, num_candidates=16)
    identity = target_identity(target.config, config.tap_layers, tokenizer_fingerprint(tokenizer))
    with FeatureWriter(tmp_path / "store", identity) as writer:
        build_store(target, config.tap_layers, writer, training_sequences(tmp_path / "rows.jsonl"))
    drafter, metrics = train_drafter(
        target,
        tokenizer,
        tmp_path / "store",
        tmp_path / "run",
        drafter_config=config,
        config=TrainConfig(steps=4, batch_size=2, num_anchors=8, num_depths=2, eval_every=2),
        candidates=CandidateConfig(steps=4, num_runs=8, rows=16),
    )
    loaded = Eagle4Drafter.from_pretrained(tmp_path / "run" / "drafter")
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert loaded.config.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == metrics
    assert set(metrics["candidate_recall"]) == {"weighted", "trained"}
