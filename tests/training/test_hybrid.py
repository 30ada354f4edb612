"""Can catch: features of a target with recurrent layers that are not what its drafter gets."""

import torch
import zoo_hybrid
from packed import Packer, chain

from eagle4 import Eagle4ForCausalLM
from eagle4.training.extract import check_head, extract
from eagle4.training.trainer import TrainConfig, Trainer
from tests.training.small import TAPS, VOCAB, tiny_drafter, tiny_store

TRAINING = TrainConfig(
    steps=50,
    batch_size=2,
    num_anchors=12,
    num_depths=3,
    num_frequent=16,
    num_sampled=8,
    held_out_fraction=0.0,
    lr=1e-2,
)


def hybrid():
    target = zoo_hybrid.build("qwen3_next", vocab_size=VOCAB).requires_grad_(False)
    target.lm_head.weight.mul_(4.0)
    return target


def test_features_are_what_the_drafter_gets():
    for name in zoo_hybrid.HYBRIDS:
        target = zoo_hybrid.build(name)
        ids = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(0))
        taps, _ = extract(target, TAPS, ids)
        packer = Packer(target, taps=TAPS)
        out = packer.run(chain(0, 0, ids[:-1].tolist()), is_prompt=True)
        error = (out.features_RTH - taps.float()).abs().max()
        assert error < 1e-2 * taps.float().abs().max(), name


def test_a_drafter_that_learned_a_text_drafts_it(tmp_path):
    target = hybrid()
    store = tiny_store(tmp_path / "store", target, num_sequences=1, length=32)
    ids = store[0].ids.long()
    check_head(target, ids)
    trainer = Trainer(tiny_drafter(target), store, tmp_path / "run", TRAINING)
    trainer.train()
    model = Eagle4ForCausalLM(target, trainer.drafter)
    start = {"input_ids": ids[None, :8], "attention_mask": torch.ones(1, 8, dtype=torch.int64)}
    speculative = {"max_depth": 3, "harness": False}
    out = model.generate(**start, speculative=speculative, max_new_tokens=24)
    assert out[0].tolist() == ids.tolist()
    assert model.last_speculation.accept_length > 3
