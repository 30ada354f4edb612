"""Packed CPU weights for few-row GEMMs, in place only while a generation runs.

The stock linear costs far more for 2..32 rows than for one on CPUs without matrix units, which eats
what a tree saves; in bf16 it also re-orders the whole weight in every call, which doubles a 1-row
product. oneDNN's blocked weight layout (what Inductor's freezing also uses) avoids both. The packed
copy doubles the weight memory, so it is made only when it fits comfortably. fp32 is packed on every
CPU, bf16 where the CPU multiplies it.

Products of few rows take microseconds, and so do their calls: linears that read the same input
(query, key and value; gate and up) share one packed weight and one product.
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
_LEAST = 1 << 16  # weights below that size gain nothing
# Names under which a module keeps linears that it calls with one input, in order, by the first.
_SIBLINGS = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}

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
        self._packed: dict[tuple[str, ...], _Copy] = {}  # by the layers' names

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the context the linears run on packed weights, where that fits in memory."""
        layers = dict(_layers_to_pack(self.model, bool(self._packed)))
        groups = _groups(layers)
        for group in set(self._packed) - set(groups):
            del self._packed[group]
        try:
            for group in groups:
                members = [layers[name] for name in group]
                _put_in_place(members, self._weight(group, members))
            yield
        finally:
            for layer in layers.values():
                layer.__class__ = nn.Linear
                for attribute in PackedLinear.__annotations__:
                    layer.__dict__.pop(attribute, None)

    def _weight(self, group: tuple[str, ...], layers: list[nn.Linear]) -> torch.Tensor:
        weights = [layer.weight.detach() for layer in layers]
        found = self._packed.get(group)
        if found is None or not found.is_of(weights):
            whole = weights[0] if len(weights) == 1 else torch.cat(weights)
            packed = torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS_HINT)
            identity, samples = map(_identity, weights), [_sample(w).clone() for w in weights]
            self._packed[group] = found = _Copy(tuple(identity), samples, packed)
        return found.packed


class _Copy(NamedTuple):
    """A packed weight and what identifies its source.

    The version counter misses changes through ``weight.data`` (merging LoRA does that), so a
    sample of the values is compared as well.
    """

    identity: tuple[tuple[int, int], ...]
    samples: list[torch.Tensor]
    packed: torch.Tensor

    def is_of(self, weights: list[torch.Tensor]) -> bool:
        return self.identity == tuple(map(_identity, weights)) and all(
            torch.equal(sample, _sample(weight))
            for sample, weight in zip(self.samples, weights, strict=True)
        )


def _identity(weight: torch.Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _sample(weight: torch.Tensor) -> torch.Tensor:
    # An odd stride visits all columns of the usual even widths.
    return weight.view(-1)[:: weight.numel() // 256 | 1]


class PackedLinear(nn.Linear):
    """What a linear is while its packed copy is in place.

    Its class changes, not its ``forward``: a compiler compares classes, so one compiled block
    serves every layer, while a ``forward`` of its own would make each layer another case.

    Siblings share everything but their ``place``: the one that is called first multiplies for all.
    """

    packed_weight: torch.Tensor
    packed_bias: torch.Tensor | None
    widths: tuple[int, ...]  # outputs of the siblings
    place: int
    shared: list  # the last input and what it gave each of them, until the last one took its part

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if len(self.widths) == 1:
            return self._product(input)
        if self.shared[0] is not input:
            self.shared[:] = [input, self._product(input).split(self.widths, dim=-1)]
        out = self.shared[1][self.place]
        if self.place == len(self.widths) - 1:
            self.shared[:] = [None, ()]
        return out.contiguous()  # as a linear's output is; models may view it as they like

    def _product(self, input: torch.Tensor) -> torch.Tensor:
        flat = input.reshape(-1, input.shape[-1])
        if torch.compiler.is_compiling():
            out = torch.ops.eagle4.packed_linear(flat, self.packed_weight, self.packed_bias)
        else:
            out = _packed_linear(flat, self.packed_weight, self.packed_bias)
        return out.view(*input.shape[:-1], out.shape[-1])


def _put_in_place(layers: list[nn.Linear], weight: torch.Tensor) -> None:
    biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)
    widths, shared = tuple(layer.out_features for layer in layers), [None, ()]
    for place, layer in enumerate(layers):
        values = weight, bias, widths, place, shared
        layer.__dict__ |= dict(zip(PackedLinear.__annotations__, values, strict=True))
        layer.__class__ = PackedLinear


def _groups(layers: dict[str, nn.Linear]) -> list[tuple[str, ...]]:
    """The layers' names; siblings that can share a product are together."""
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in layers}
    for first in layers:
        last = first.rpartition(".")[2]
        siblings = tuple(first.removesuffix(last) + name for name in _SIBLINGS.get(last, ()))
        if siblings and _go_together([layers.get(name) for name in siblings]):
            groups[first] = siblings
            for name in siblings[1:]:
                del groups[name]
    return list(groups.values())


def _go_together(layers: list[nn.Linear | None]) -> bool:
    kinds = {
        layer and (layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers
    }
    return None not in kinds and len(kinds) == 1


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
        and weight.numel() >= _LEAST
    )


def _has_packed_kernel(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
