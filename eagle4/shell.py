"""`TargetShell`: what Transformers expects of a causal LM, passed on to the target.

A base class with one child, so that `modeling` shows only what eagle4 adds.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel


class TargetShell(PreTrainedModel, GenerationMixin):
    """A composite whose ``target`` is the language model that everybody asks for."""

    target: Any
    base_model_prefix = "target"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ):
        """The target's own forward. The named arguments are those that `generate` looks for."""
        return self.target(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def init_weights(self) -> None:
        """Nothing: both parts were initialised or loaded before they got here."""

    def _validate_model_kwargs(self, model_kwargs: dict) -> None:
        self.target._validate_model_kwargs(model_kwargs)

    def _supports_logits_to_keep(self) -> bool:
        return self.target._supports_logits_to_keep()

    def prepare_inputs_for_generation(self, *args, inputs_embeds=None, **kwargs):
        # Named, because `generate` looks for it; passed on only to targets that may know it.
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        return self.target.prepare_inputs_for_generation(*args, **kwargs)

    def get_input_embeddings(self):
        return self.target.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.target.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.target.get_output_embeddings()

    def set_output_embeddings(self, value):
        self.target.set_output_embeddings(value)

    def get_decoder(self):
        return self.target.get_decoder()
