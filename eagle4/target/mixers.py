"""The seam for recurrent layers: their mixers' `forward` while a generation runs.

Attention layers call a registered function; recurrent mixers have no such place, so their `forward`
is replaced for the duration of `RecurrentMixers.active`. The replacement uses the mixer's own
submodules and parameters, whose names are fixed by its checkpoints, and `cache.convolve` and
`cache.mix` in between. Blocks, norms, projections and everything else stay Transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache import KVPool, RecurrentPool, StateShape
from . import gated_delta, mamba2, short_conv
from .attention import OutsideCallError, PackedState

RECURRENT_TYPES = ("linear_attention", "conv", "hybrid")  # of a config's layer_types
Run = Callable[[Any, torch.Tensor, PackedState], torch.Tensor]  # [1, R, hidden] in and out


class Kind(NamedTuple):
    """One kind of recurrent mixer."""

    run: Run
    shape: Callable[[Any], StateShape]


_GATED_DELTA = Kind(gated_delta.run, gated_delta.shape)
_MAMBA2 = Kind(mamba2.run, mamba2.shape)
_SHORT_CONV = Kind(short_conv.run, short_conv.shape)
KINDS = {
    "Qwen3NextGatedDeltaNet": _GATED_DELTA,
    "Qwen3_5GatedDeltaNet": _GATED_DELTA,
    "Qwen3_5MoeGatedDeltaNet": _GATED_DELTA,
    "OlmoHybridGatedDeltaNet": _GATED_DELTA,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Lfm2ShortConv": _SHORT_CONV,
    "Lfm2MoeShortConv": _SHORT_CONV,
}


class RecurrentMixers:
    """The recurrent mixers of one model; false when it has none."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        decoder = model.get_decoder()
        found = (m for m in decoder.modules() if type(m).__name__ in KINDS)
        self.mixers: list[Any] = sorted(found, key=lambda mixer: mixer.layer_idx)
        _check_complete(model, {mixer.layer_idx for mixer in self.mixers})
        for mixer in self.mixers:
            _check_arguments(type(model).__name__, type(mixer))
        shapes = {KINDS[type(mixer).__name__].shape(mixer) for mixer in self.mixers}
        if len(shapes) > 1:
            raise ValueError(
                f"target {type(model).__name__} cannot be a target: its recurrent layers keep "
                f"states of different shapes ({sorted(shapes)}); eagle4 supports one shape"
            )
        self.shape = shapes.pop() if shapes else None

    def __bool__(self) -> bool:
        return bool(self.mixers)

    def others(self, blocks: Iterable[nn.Module]) -> list[nn.Module]:
        """The blocks without a recurrent mixer, which only need their own share of a step."""
        own = set(self.mixers)
        return [block for block in blocks if not own.intersection(block.modules())]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Packed mixers inside; afterwards every mixer is what it was."""
        before = [mixer.__dict__.get("forward") for mixer in self.mixers]
        try:
            for mixer in self.mixers:
                mixer.forward = _PackedMixer(mixer)
            yield
        finally:
            for mixer, forward in zip(self.mixers, before, strict=True):
                mixer.__dict__.pop("forward", None)
                if forward is not None:
                    mixer.forward = forward

    def state_of(self, pool: KVPool) -> RecurrentPool:
        """The recurrent state beside the pool's K/V, made at first use."""
        if pool.recurrent is None:
            assert self.shape is not None
            weight = next(self.mixers[0].parameters())
            layers = [mixer.layer_idx for mixer in self.mixers]
            dtype = self.model.get_input_embeddings().weight.dtype
            pool.recurrent = RecurrentPool(self.shape, layers, dtype, weight.device)  # type: ignore
        return pool.recurrent


def _check_complete(model: PreTrainedModel, known: set[int]) -> None:
    """A recurrent layer that ran in its own form would mix the branches of a tree."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    missing = {layer for layer, kind in enumerate(kinds) if kind in RECURRENT_TYPES} - known
    if missing:
        raise ValueError(
            f"target {type(model).__name__} does not take packed rows: the mixers of its recurrent "
            f"layers {sorted(missing)} are none of {sorted(KINDS)}"
        )


def _check_arguments(target: str, mixer: type[nn.Module]) -> None:
    """The state arrives as a keyword argument, which older versions do not hand down everywhere."""
    parameters = inspect.signature(mixer.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(
            f"target {target} cannot be a target: this version of Transformers hands no keyword "
            f"arguments down to its {mixer.__name__}; update transformers to 5.24 or later"
        )


class _PackedMixer:
    """Replacement for a mixer's `forward` over packed rows."""

    def __init__(self, mixer: nn.Module):
        self.mixer = mixer
        self.run = KINDS[type(mixer).__name__].run

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *args,
        eagle4_state: PackedState | None = None,
        **kwargs,
    ) -> torch.Tensor:
        if eagle4_state is None:
            raise OutsideCallError
        return self.run(self.mixer, hidden_states, eagle4_state)
