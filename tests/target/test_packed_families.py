"""Catches: a family whose forward does not go with packed linears: one that calls siblings with
different inputs, in another order, or views a shared product in a way that its layout forbids."""

from __future__ import annotations

import pytest
import torch
import zoo
import zoo_hybrid

from eagle4 import Eagle4ForCausalLM
from eagle4.ops import packing

BUILD = {
    **dict.fromkeys(zoo.FAMILIES, zoo.build),
    **dict.fromkeys(zoo_hybrid.HYBRIDS, zoo_hybrid.build),
}


@pytest.mark.parametrize("name", BUILD)
def test_every_family_decodes_the_same_on_packed_weights(name, monkeypatch):
    monkeypatch.setattr(packing, "_LEAST", 1)
    target = BUILD[name](name)
    model = Eagle4ForCausalLM(target, None)
    ids = torch.tensor([[0, 5, 9, 33, 40], [7, 3, 2, 8, 11]])
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = target.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert model.adapter._packed._packed, "nothing was packed"
