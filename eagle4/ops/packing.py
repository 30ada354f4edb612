"""Packed CPU weights for few-row GEMMs, in place only while a generation runs.

The stock linear costs far more for 2..32 rows than for one on CPUs without matrix units, which eats
what a tree saves; in bf16 it also re-orders the whole weight in every call, which doubles a 1-row
product. oneDNN's blocked weight layout (what Inductor's freezing also uses) avoids both. The packed
copy doubles the weight memory, so it is made only when it fits comfortably. fp32 is packed on every
CPU, bf16 where the CPU multiplies it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch
from torch import nn

_ROWS_HINT = 16

# Inductor insists on constant weights when it meets oneDNN's own operator; behind this name it
# leaves the call as it is, and one compiled block serves every layer's weights.
_library = torch.library.Library("eagle4", "FRAGMENT")
_library.define("packed_linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.impl(_library, "packed_linear", "CompositeExplicitAutograd")
def _packed_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


@torch.library.register_fake("eagle4::packed_linear", lib=_library)
def _fake_packed_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]))


class PackedLinears:
    """Packed copies of a model's CPU linears, made at first use and kept while valid."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._packed: dict[str, _Copy] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the context the linears run on packed weights, where that fits in memory."""
        layers = dict(_layers_to_pack(self.model, bool(self._packed)))
        for name in set(self._packed) - set(layers):
            del self._packed[name]
        try:
            for name, layer in layers.items():
                layer.__dict__["packed_weight"] = self._weight(name, layer)
                layer.__class__ = PackedLinear
            yield
        finally:
            for layer in layers.values():
                layer.__class__ = nn.Linear
                layer.__dict__.pop("packed_weight", None)

    def _weight(self, name: str, layer: nn.Linear) -> torch.Tensor:
        weight = layer.weight.detach()
        found = self._packed.get(name)
        if found is None or not found.is_of(weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
            self._packed[name] = found = _Copy(_identity(weight), _sample(weight).clone(), packed)
        return found.packed


class _Copy(NamedTuple):
    """A packed weight and what identifies its source.

    The version counter misses changes through ``weight.data`` (merging LoRA does that), so a
    sample of the values is compared as well.
    """

    identity: tuple[int, int]
    sample: torch.Tensor
    packed: torch.Tensor

    def is_of(self, weight: torch.Tensor) -> bool:
        return self.identity == _identity(weight) and torch.equal(self.sample, _sample(weight))


def _identity(weight: torch.Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _sample(weight: torch.Tensor) -> torch.Tensor:
    # An odd stride visits all columns of the usual even widths.
    return weight.view(-1)[:: weight.numel() // 256 | 1]


class PackedLinear(nn.Linear):
    """What a linear is while its packed copy is in place.

    Its class changes, not its ``forward``: a compiler compares classes, so one compiled block
    serves every layer, while a ``forward`` of its own would make each layer another case.
    """

    packed_weight: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        flat = input.reshape(-1, input.shape[-1])
        if torch.compiler.is_compiling():
            out = torch.ops.eagle4.packed_linear(flat, self.packed_weight, self.bias)
        else:
            out = _packed_linear(flat, self.packed_weight, self.bias)
        return out.view(*input.shape[:-1], out.shape[-1])


def _layers_to_pack(model: nn.Module, already: bool) -> list[tuple[str, nn.Linear]]:
    if not torch.backends.mkldnn.is_available() or os.environ.get("EAGLE4_PACK_WEIGHTS") == "0":
        return []
    if torch.is_autocast_enabled("cpu"):  # the packed kernel would not take part in it
        return []
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and _is_packable(module)
    ]
    size = sum(layer.weight.numel() * layer.weight.element_size() for _, layer in layers)
    return layers if already or size <= psutil.virtual_memory().available // 2 else []


def _is_packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        weight.device.type == "cpu"
        and _has_packed_kernel(weight.dtype)
        and type(weight) is nn.Parameter
        and weight.is_contiguous()
        and not weight.is_inference()  # those have no version counter
        and "forward" not in layer.__dict__
        and weight.numel() >= 1 << 16
    )


def _has_packed_kernel(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
