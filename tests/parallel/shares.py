"""Targets of which every rank reads its share, compared with targets that were read whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from eagle4 import Eagle4ForCausalLM
from eagle4.pair import hub_config
from eagle4.parallel import Ranks, shard_target
from eagle4.parallel.loading import can_load_share, load_share


def families(ranks: Ranks, folder: str, names: list[str]) -> dict[str, Any]:
    """What differs between the two ways of loading, and the part of the weights that was read."""
    found: dict[str, Any] = {}
    ids = torch.arange(2, 14).view(2, 6)
    for name in names:
        source, dtype = f"{folder}/{name}", torch.float32
        config = hub_config(source, {})
        assert can_load_share(config, {}), name
        split: Any = load_share(source, config, ranks, dtype=dtype)
        read = sum(_local(p).numel() for p in split.parameters())
        whole: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        total = sum(p.numel() for p in whole.parameters())
        shard_target(split, ranks)
        shard_target(whole, ranks)
        wanted, got = (dict(model.named_parameters()) for model in (whole, split))
        differ = [key for key in wanted if not torch.equal(wanted[key], got[key])]
        special = [key for key, p in got.items() if type(p) is not torch.nn.Parameter]
        with torch.no_grad():
            logits = [model(input_ids=ids).logits for model in (whole, split)]
        is_same = type(split) is type(whole) and wanted.keys() == got.keys()
        found[name] = {
            "wrong": differ + special,
            "same": is_same and torch.equal(*logits) and split.dtype == whole.dtype,
            "read": read / total,
        }
    return found


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def answers(ranks: Ranks, folder: str) -> dict[str, Any]:
    """Ids of a pair whose target is read in shares; the weights on disk are bf16."""
    ids = torch.tensor([[3, 5, 7]])
    model: Any = Eagle4ForCausalLM.from_pretrained(
        f"{folder}/target",
        f"{folder}/drafter",
        tp_size=ranks.size,
        device="cpu",
        dtype=torch.float32,
    )
    kinds = {type(parameter) for parameter in model.parameters()}
    out = model.generate(ids, max_new_tokens=8, speculative="eagle4", do_sample=False)
    return {"ids": out.tolist(), "kinds": len(kinds), "dtype": str(model.target.dtype)}
