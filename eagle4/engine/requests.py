"""From `generate`'s arguments to an engine request: what is served, refused, or left to Transformers.

Refusals happen before the first forward and name the argument.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..config import SpeculativeConfig
from .loop import Request
from .prefix import Eagle4Cache

# Transformers 5.24 renamed past_key_values to cache in forwards, outputs and generate.
CACHE_KEYWORD = (
    "cache"
    if "cache" in inspect.signature(GenerateDecoderOnlyOutput).parameters
    else "past_key_values"
)
_CACHE_NAMES = ("cache", "past_key_values")


def resolve(model, generation_config: GenerationConfig | None, kwargs: dict) -> Any:
    """The call's ``speculative``: argument, then its config, then the model's config."""
    if "speculative" in kwargs:
        value = kwargs.pop("speculative")
    elif generation_config is not None and hasattr(generation_config, "speculative"):
        value = generation_config.speculative
    else:
        value = getattr(model.generation_config, "speculative", None)
    return SpeculativeConfig.parse(value)


def serialise(config: SpeculativeConfig | None) -> dict | None:
    """JSON-safe form that travels on the generation config."""
    return None if config is None else dataclasses.asdict(config)


def check_arguments(
    model,
    speculative: SpeculativeConfig | None,
    inputs: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    kwargs: dict,
) -> None:
    """Raise `ValueError` for what cannot be honoured."""
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    if ids is not None and ids.ndim == 2 and ids.shape[1] == 0:
        raise ValueError("the prompt is empty; pass at least one token (for example the BOS token)")
    for name in _CACHE_NAMES:
        if isinstance(kwargs.get(name), Eagle4Cache) and kwargs[name] is not None:
            break
    else:
        foreign = [name for name in _CACHE_NAMES if kwargs.get(name) is not None]
        if foreign and speculative is not None:
            raise ValueError(
                f"{foreign[0]} is a {type(kwargs[foreign[0]]).__name__}; with speculative= pass the "
                "cache that eagle4's generate returned, or none"
            )
    if speculative is not None:
        _refuse(model, generation_config, kwargs)


def _refuse(model, generation_config: GenerationConfig | None, kwargs: dict) -> None:
    def setting(name: str, default: Any = None) -> Any:
        if kwargs.get(name) is not None:
            return kwargs[name]
        for config in (generation_config, model.generation_config):
            if config is not None and getattr(config, name, None) is not None:
                return getattr(config, name)
        return default

    if setting("do_sample", False):
        raise ValueError(
            "do_sample=True is not supported with speculative= yet; pass do_sample=False for greedy "
            "decoding or speculative=None to sample without speculation"
        )
    if setting("num_beams", 1) > 1:
        raise ValueError("num_beams > 1 cannot be combined with speculative=; use num_beams=1")
    if setting("output_attentions", False):
        raise ValueError("output_attentions=True cannot be combined with speculative=")
    if setting("use_cache", True) is False:
        raise ValueError("use_cache=False cannot be combined with speculative=")
    if setting("cache_implementation") is not None:
        raise ValueError(
            f"cache_implementation={setting('cache_implementation')!r} cannot be combined with "
            "speculative=: eagle4 brings its own paged cache; leave it unset"
        )
    if (setting("guidance_scale") or 1) != 1:
        raise ValueError("guidance_scale cannot be combined with speculative=")
    if setting("penalty_alpha") or setting("dola_layers") or setting("constraints"):
        raise ValueError("contrastive, DoLa and constrained search cannot be combined with speculative=")
    if setting("prompt_lookup_num_tokens") is not None:
        raise ValueError("prompt_lookup_num_tokens cannot be combined with speculative=")
    for name in ("assistant_model", "custom_generate", "inputs_embeds", "negative_prompt_ids"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} cannot be combined with speculative=")
    if kwargs.get("synced_gpus"):
        raise ValueError("synced_gpus=True cannot be combined with speculative=")


def uses_engine(generation_config: GenerationConfig, model_kwargs: dict) -> bool:
    """Whether the engine decodes this call: all greedy decoding that it can honour."""
    if getattr(generation_config, "speculative", None) is not None:
        return True
    foreign = any(
        model_kwargs.get(name) is not None and not isinstance(model_kwargs[name], Eagle4Cache)
        for name in _CACHE_NAMES
    )
    return not (
        generation_config.do_sample
        or foreign
        or (generation_config.num_beams or 1) > 1
        or generation_config.output_attentions
        or generation_config.use_cache is False
        or generation_config.cache_implementation is not None
        or (generation_config.guidance_scale or 1) != 1
        or generation_config.is_assistant
        or model_kwargs.get("inputs_embeds") is not None
    )


def build(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    processors,
    criteria,
    generation_config: GenerationConfig,
    streamer,
    model_kwargs: dict,
) -> Request:
    """The engine request of a prepared `generate` call. Raises `ValueError` for bad prompts."""
    cache = next((model_kwargs[n] for n in _CACHE_NAMES if model_kwargs.get(n) is not None), None)
    mask = model_kwargs.get("attention_mask")
    ids = _with_cached_tokens(input_ids, mask, generation_config, cache)
    pads = _left_padding(ids, mask)
    text = target.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    longest = ids.shape[1] - min(pads)
    if limit is not None and longest > limit:
        raise ValueError(
            f"the prompt has {longest} tokens but the target's context ends at {limit}; shorten it"
        )
    pad = generation_config._pad_token_tensor
    return Request(
        input_ids=ids,
        pads=pads,
        processors=processors,
        criteria=criteria,
        max_length=generation_config.max_length + ids.shape[1] - input_ids.shape[1],
        pad_token=0 if pad is None else int(pad),
        pads_finished=any(hasattr(criterion, "eos_token_id") for criterion in criteria),
        max_position=limit,
        streamer=streamer,
        cache=cache,
        output_scores=bool(generation_config.return_dict_in_generate)
        and bool(generation_config.output_scores),
        output_logits=bool(generation_config.return_dict_in_generate)
        and bool(generation_config.output_logits),
        output_hidden_states=bool(generation_config.return_dict_in_generate)
        and bool(generation_config.output_hidden_states),
    )


def _with_cached_tokens(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    generation_config: GenerationConfig,
    cache: Eagle4Cache | None,
) -> torch.Tensor:
    """Full ids when the caller passed only the new ones with a mask over everything."""
    covered = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", 0)
    missing = (covered or 0) - input_ids.shape[1]
    if missing <= 0:
        return input_ids
    if cache is None:
        raise ValueError(
            f"attention_mask covers {covered} tokens but input_ids has {input_ids.shape[1]}; pass "
            "the cache that holds the others, or all input_ids"
        )
    known = cache.state.ids_BT[:, :missing]
    if known.shape[1] < missing:
        raise ValueError(
            f"attention_mask covers {covered} tokens, but cache and input_ids hold only "
            f"{known.shape[1] + input_ids.shape[1]}"
        )
    return torch.cat([known.to(input_ids.device), input_ids], dim=1)


def _left_padding(ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Left-padding columns per row. Raises `ValueError` for holes, right padding, empty rows."""
    if mask is None:
        return [0] * len(ids)
    kept = mask.bool()
    pads = (~kept).sum(dim=1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    if (kept != (columns >= pads.unsqueeze(1))).any():
        raise ValueError(
            "attention_mask must be left padding only (zeros, then ones); set "
            "padding_side='left' on the tokenizer"
        )
    if (pads == mask.shape[1]).any():
        raise ValueError("a row of the batch has no tokens: its attention_mask is all zeros")
    return pads.tolist()
