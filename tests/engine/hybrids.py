"""Shared tiny hybrids and prompts for the engine's tests."""

from __future__ import annotations

import functools
from typing import Any

import torch
import zoo_hybrid
from transformers import PreTrainedModel
from zoo import VOCAB

SCRIPT = {"max_depth": 6, "top_k": 3, "max_nodes": 12, "harness": False}


@functools.cache
def target_of(name: str) -> PreTrainedModel:
    return zoo_hybrid.build(name)


def prompt(length: int, seed: int = 0) -> dict[str, Any]:
    """One random prompt without padding."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(1, VOCAB, (1, length), generator=generator)}
