"""The arms of a comparison: ways to answer the same prompt with the same weights.

- ``transformers``: the bare target's own `generate`, the baseline that users know.
- ``plain``: the engine without drafting. Ratios against it isolate what speculation brings.
- ``eagle4``: the engine with speculation; ``chain`` is the same with a tree of width 1.
- ``rejection``, ``rejection-chain``: these two with ``sampling="rejection"``, for sampled decoding.

The time of an arm covers the whole `generate` call: prefill, decoding and bookkeeping.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..config import SpeculativeConfig

ARM_NAMES = ("transformers", "plain", "eagle4", "chain", "rejection", "rejection-chain")
SPECULATION_FIELDS = (
    "rounds",
    "target_calls",
    "accept_length",
    "accepted_per_round",
    "acceptance_by_depth",
    "nodes_drafted",
    "nodes_verified",
    "seconds",
    "plain_rounds",
    "fallbacks",
    # Denominators: with them averages over several calls are exact quotients.
    "verifications",
    "drafted_by_depth",
    "harness",
)


class ArmRun(NamedTuple):
    """One `generate` call: new tokens per sequence (EOS included), wall time, statistics."""

    tokens: list[list[int]]
    seconds: float
    speculation: dict[str, Any] | None

    @property
    def num_tokens(self) -> int:
        return sum(len(row) for row in self.tokens)


Arm = Callable[[Mapping[str, torch.Tensor], int], ArmRun]


def make_arms(
    model,
    target,
    names: Sequence[str],
    speculative: SpeculativeConfig | None = None,
    decoding: Mapping[str, Any] | None = None,
) -> dict[str, Arm]:
    """Arms by name, in the given order. Raises `ValueError` for an unknown name.

    ``decoding``: arguments of `generate` such as ``do_sample``, ``temperature`` and ``seed``; the
    default is greedy.
    """
    unknown = sorted(set(names) - set(ARM_NAMES))
    if unknown:
        raise ValueError(f"unknown arms {unknown}; allowed are {list(ARM_NAMES)}")
    config = speculative or SpeculativeConfig()
    rejection = dataclasses.replace(config, sampling="rejection")
    modes: dict[str, Any] = {
        "plain": None,
        "eagle4": config,
        "chain": dataclasses.replace(config, mode="chain"),
        "rejection": rejection,
        "rejection-chain": dataclasses.replace(rejection, mode="chain"),
    }
    decoding = {"do_sample": False, **(decoding or {})}
    return {
        name: make_arm(model, speculative=modes[name], **decoding)
        if name in modes
        else make_arm(target, **decoding)
        for name in names
    }


def eos_ids(generation_config) -> set[int]:
    """The end-of-sequence ids: none, one or several."""
    value = getattr(generation_config, "eos_token_id", None)
    if value is None:
        return set()
    return {int(token) for token in (value if isinstance(value, (list, tuple)) else [value])}


def new_tokens(sequences: torch.Tensor, prompt_length: int, eos: set[int]) -> list[list[int]]:
    """What was generated, per sequence: up to and including the first EOS, padding dropped."""
    rows = sequences[:, prompt_length:].tolist()
    return [_cut(row, eos) for row in rows]


def speculation_fields(speculation: Any) -> dict[str, Any] | None:
    """The documented statistics as plain Python values, from an object or a mapping."""
    if speculation is None:
        return None
    read = speculation.get if isinstance(speculation, Mapping) else None
    values = {
        name: read(name) if read else getattr(speculation, name, None)
        for name in SPECULATION_FIELDS
    }
    return {name: _plain_value(value) for name, value in values.items()}


def neutral_arguments(generation_config) -> dict[str, Any]:
    """Arguments that switch the model's default penalties off: then argmax means raw argmax."""
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    return {
        name: value
        for name, value in neutral.items()
        if getattr(generation_config, name, None) not in (None, value)
    }


def make_arm(model, **extra: Any) -> Arm:
    """Greedy answers of a model, with more arguments for `generate`."""
    eos = eos_ids(model.generation_config)
    fixed = {
        "do_sample": False,
        "return_dict_in_generate": True,
        **neutral_arguments(model.generation_config),
        **extra,
    }
    # Transformers knows no seed; the engine could do without this, too.
    seed = fixed.pop("seed", None) if "speculative" not in extra else None

    def run(inputs: Mapping[str, torch.Tensor], max_new_tokens: int) -> ArmRun:
        length = inputs["input_ids"].shape[1]
        if seed is not None:
            torch.manual_seed(seed)
        _synchronize()
        start = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, **fixed)
        _synchronize()
        seconds = time.perf_counter() - start
        tokens = new_tokens(out.sequences, length, eos)
        return ArmRun(tokens, seconds, speculation_fields(getattr(out, "speculation", None)))

    return run


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cut(row: list[int], eos: set[int]) -> list[int]:
    for index, token in enumerate(row):
        if token in eos:
            return row[: index + 1]
    return row


def _plain_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    return value
