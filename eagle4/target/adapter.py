"""`TargetAdapter`: packed forwards of a Transformers causal LM, with taps.

`attached` switches the attention implementation and hooks the tapped blocks for the duration of one
generation and restores both afterwards, whatever happens in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache import AttentionStep, KVPool
from ..ops import PackedLinears
from ..parallel import VocabShard
from . import attention
from .blocks import RunBlocks, replaced
from .families import check_target, is_proven
from .mixers import RecurrentMixers
from .probe import probe


class TargetOutput(NamedTuple):
    """One packed forward."""

    logits_RV: torch.Tensor  # raw logits of the asked rows; of `TargetAdapter.vocab` when split
    features_RTH: torch.Tensor | None  # taps of every row, low to high
    hidden_states: tuple[torch.Tensor, ...] | None  # every layer's [R, H] when asked


class TargetAdapter:
    """Runs an unmodified causal LM over packed rows. Raises `ValueError` for unfit models."""

    def __init__(self, model: PreTrainedModel, tap_layers: list[int] | None = None):
        check_target(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.blocks = decoder_blocks(model)
        self.tap_layers = list(tap_layers or [])
        for tap in self.tap_layers:
            if not 0 <= tap < len(self.blocks):
                raise ValueError(
                    f"tap layer {tap} does not exist: the target has blocks "
                    f"0..{len(self.blocks) - 1}"
                )
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._taps: dict[int, torch.Tensor] = {}
        self.taps_now: tuple[int, ...] = ()  # the tapped blocks, while attached
        self._packed = PackedLinears(model)
        self.vocab: VocabShard | None = None
        self.mixers = RecurrentMixers(model)
        if not is_proven(model):
            probe(self)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype  # type: ignore[return-value]

    def share(self, vocab: VocabShard) -> None:
        """The model was split: from now on packed forwards give this rank's columns of logits."""
        self.vocab = vocab
        self._packed = PackedLinears(self.model)

    @contextmanager
    def attached(
        self, with_taps: bool = True, run_blocks: RunBlocks | None = None
    ) -> Iterator[TargetAdapter]:
        """Packed attention and taps are in place inside, gone outside.

        The blocks run through ``run_blocks`` when it is given.
        """
        taps = self.tap_layers if with_taps else []
        configs = _with_sub_configs(self.model.config)
        if not any(config is self.config for config in configs):
            configs.append(self.config)
        before = [config._attn_implementation for config in configs]
        handles = [self.blocks[tap].register_forward_hook(self._tap_hook(tap)) for tap in taps]
        try:
            self.taps_now = tuple(taps)
            for config in configs:
                config._attn_implementation = attention.NAME
            blocks = self.mixers.others(self.blocks)
            with (
                self.evaluating(),
                self._packed.active(),
                self.mixers.active(),
                replaced(blocks, run_blocks),
                nullcontext() if self.vocab is None else self.vocab.local(),
            ):
                yield self
        finally:
            for handle in handles:
                handle.remove()
            # Parents come first: setting one also sets its sub-configs.
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation = name
            self._taps.clear()
            self.taps_now = ()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode inside; afterwards every module is in the mode that it was in."""
        training = [module for module in self.model.modules() if module.training]
        try:
            if training:
                self.model.eval()
            yield
        finally:
            for module in training:
                module.training = True

    def _tap_hook(self, tap: int):
        def hook(module: nn.Module, args, output) -> None:
            self._taps[tap] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    def forward(
        self,
        token_R: torch.Tensor,
        step: AttentionStep,
        pool: KVPool,
        keep: torch.Tensor | None = None,
        all_hidden_states: bool = False,
        calls: dict[int, attention.AttentionCall] | None = None,
    ) -> TargetOutput:
        """Run packed rows. ``keep`` selects the rows whose logits are computed (None: all).

        ``calls``, when given, is filled with what every layer's attention call carried.
        """
        self._taps.clear()
        recurrent = self.mixers.state_of(pool) if self.mixers else None
        if recurrent is not None:
            assert step.lineage is not None
            recurrent.begin(step.lineage)
        kwargs: dict = {attention.KEYWORD: attention.PackedState(step, pool, calls)}
        if keep is not None and self._keeps_logits:
            kwargs["logits_to_keep"] = keep
        if all_hidden_states:
            kwargs["output_hidden_states"] = True
        out = self.model(
            input_ids=token_R.unsqueeze(0),
            position_ids=step.position_R.unsqueeze(0),
            # A 4-D mask is passed through untouched, so Transformers builds none; visibility
            # comes from the step.
            attention_mask=token_R.new_ones((1, 1, 1, 1), dtype=torch.bool),
            use_cache=False,
            return_dict=True,
            **kwargs,
        )
        if recurrent is not None:
            recurrent.finish()
        logits = out.logits[0]
        if keep is not None and not self._keeps_logits:
            logits = logits[keep]
        return TargetOutput(logits, self._features(), self._hidden(out, all_hidden_states))

    def _features(self) -> torch.Tensor | None:
        """None when any tap is missing: the engine then goes on without drafting."""
        if not self.tap_layers or any(tap not in self._taps for tap in self.tap_layers):
            return None
        features = torch.stack([self._taps[tap] for tap in self.tap_layers], dim=1)
        self._taps.clear()
        return features

    @staticmethod
    def _hidden(out, wanted: bool) -> tuple[torch.Tensor, ...] | None:
        return tuple(layer[0] for layer in out.hidden_states) if wanted else None


def _with_sub_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A config and everything nested in it, parents first."""
    found = [config]
    for name in config.sub_configs:
        nested = getattr(config, name, None)
        if nested is not None:
            found += _with_sub_configs(nested)
    return found


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of blocks, wherever the family keeps it."""
    decoder = model.get_decoder()
    for name in ("layers", "h", "blocks"):
        found = getattr(decoder, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise ValueError(f"cannot find the decoder blocks of {type(model).__name__}")
