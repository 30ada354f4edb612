"""Catches: a share read from the wrong place of a checkpoint, or all of it read where a part is
enough; experts merged after they were cut; weights that stay DTensors; another class or dtype than
Transformers loads; arguments under which only whole weights can be read."""

from __future__ import annotations

import pytest
import torch
import zoo
from scripted import small_drafter
from transformers import LlamaConfig

from eagle4 import Eagle4ForCausalLM
from eagle4.parallel.loading import can_load_share
from tests.parallel import shares
from tests.parallel.world import run_world

ALL = sorted({**zoo.FAMILIES, **zoo.MORE_FAMILIES} - {"gpt2": None}.keys())
SOME = ["gpt_oss", "llama_tied", "phi3", "qwen3_moe"]


@pytest.mark.parametrize(("size", "names"), [(2, SOME), (4, ALL)])
def test_every_family_reads_the_share_that_it_would_have_kept(size, names, tmp_path):
    """On four ranks key/value heads are repeated; experts come as single tensors."""
    for name in names:
        # The low precision is what casting starts from.
        zoo.build(name).bfloat16().save_pretrained(tmp_path / name)
    for found in run_world(size, shares.families, str(tmp_path), names):
        wrong = {name: own for name, own in found.items() if own["wrong"] or not own["same"]}
        assert not wrong
        assert all(own["read"] < 0.95 for own in found.values()), found


def test_a_pair_answers_as_on_one_process(tmp_path):
    target = zoo.build("llama").bfloat16()
    drafter = small_drafter(target)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    whole = Eagle4ForCausalLM(target.float(), drafter.float())
    ids = torch.tensor([[3, 5, 7]])
    wanted = whole.generate(ids, max_new_tokens=8, speculative=None, do_sample=False).tolist()
    for found in run_world(2, shares.answers, str(tmp_path)):
        assert found == {"ids": wanted, "kinds": 1, "dtype": "torch.float32"}


@pytest.mark.parametrize("kwargs", [{"device_map": "auto"}, {"state_dict": {"a": 1}}])
def test_weights_from_elsewhere_are_read_whole(kwargs):
    assert can_load_share(LlamaConfig(), {}) and not can_load_share(LlamaConfig(), kwargs)
    quantized = LlamaConfig()
    quantized.quantization_config = {"bits": 4}  # type: ignore[attr-defined]
    assert not can_load_share(quantized, {})
