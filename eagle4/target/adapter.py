"""`TargetAdapter`: packed forwards of a Transformers causal LM, with taps.

`attached` switches the attention implementation and hooks the tapped blocks for the duration of one
generation and restores both afterwards, whatever happens in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache import AttentionStep, KVPool, PageTable, Window, build_step
from . import attention
from .families import check_target, is_proven
from ..ops import PackedLinears


class TargetOutput(NamedTuple):
    """One packed forward."""

    logits_RV: torch.Tensor  # raw logits of the asked rows
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
                    f"tap layer {tap} does not exist: the target has blocks 0..{len(self.blocks) - 1}"
                )
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._taps: dict[int, torch.Tensor] = {}
        self._packed = PackedLinears(model)
        if not is_proven(model):
            self._probe()

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @contextmanager
    def attached(self, with_taps: bool = True) -> Iterator[TargetAdapter]:
        """Packed attention and taps are in place inside, gone outside."""
        taps = self.tap_layers if with_taps else []
        handles = [self.blocks[tap].register_forward_hook(self._tap_hook(tap)) for tap in taps]
        configs = [self.model.config, self.config]
        before = [config._attn_implementation for config in configs]
        was_training = self.model.training
        try:
            for config in configs:
                config._attn_implementation = attention.NAME
            if was_training:
                self.model.eval()
            with self._packed.active():
                yield self
        finally:
            for handle in handles:
                handle.remove()
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation = name
            if was_training:
                self.model.train()
            self._taps.clear()

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
    ) -> TargetOutput:
        """Run packed rows. ``keep`` selects the rows whose logits are computed (None: all)."""
        self._taps.clear()
        kwargs: dict = {attention.KEYWORD: attention.PackedState(step, pool)}
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

    @torch.no_grad()
    def _probe(self) -> None:
        """Refuse an unlisted family whose packed forward differs from its plain forward."""
        length = 12
        ids = torch.arange(length, device=self.device) % self.config.vocab_size
        plain = self.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, -4:].float()
        table, pool = PageTable(1, page_size=length), KVPool()
        table.ensure(0, length)
        pool.resize(table.num_slots)
        parts = []
        with self.attached():
            for start, stop in ((0, length - 4), (length - 4, length)):
                position = torch.arange(start, stop, device=self.device)
                visible = torch.ones(
                    stop - start, stop - start, dtype=torch.bool, device=self.device
                ).tril()
                step = build_step(table, [Window(0, start, 0, position, visible)], self.device)
                parts.append(self.forward(ids[start:stop], step, pool).logits_RV)
        packed = parts[-1].float()
        error = (packed - plain).abs().max() / plain.std().clamp_min(1e-6)
        limit = 1e-3 if self.dtype == torch.float32 else 0.5
        if not error <= limit:
            raise ValueError(
                f"target {type(self.model).__name__} (model_type {self.config.model_type!r}) does "
                f"not take packed rows: a packed forward differs from a plain one by {error:.2g} "
                f"standard deviations (limit {limit}); this family is not supported"
            )


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of blocks, wherever the family keeps it."""
    decoder = model.get_decoder()
    for name in ("layers", "h", "blocks"):
        found = getattr(decoder, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise ValueError(f"cannot find the decoder blocks of {type(model).__name__}")
