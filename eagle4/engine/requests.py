"""From `generate`'s arguments to an engine request: served, refused, or left to Transformers.

Refusals happen before the first forward and name the argument.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from ..config import SpeculativeConfig
from .call import Request
from .masks import are_default_positions, is_left_padded, left_padding, num_known
from .prefix import Eagle4Cache
from .sampler import check_seed, make_sampler

_CACHE_NAMES = ("cache", "past_key_values")
# What `generate` prepares for every model. Anything else would not reach the target's forward.
_SERVED = {*_CACHE_NAMES, "attention_mask", "position_ids", "logits_to_keep", "use_cache"} | {
    "output_hidden_states"
}
# Settings that change how tokens are found or what is returned -> values that leave it alone.
_SETTINGS = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "output_attentions": (None, False),
    "use_cache": (None, True),
    "guidance_scale": (None, 1),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "constraints", "force_words_ids"), (None, 0)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"), (None, 0)),
    **dict.fromkeys(("is_assistant", "speculation_type", "continuous_batching_config"), (None, 0)),
}
_ARGUMENTS = (
    *("assistant_model", "custom_generate", "inputs_embeds", "negative_prompt_ids"),
    *("negative_prompt_attention_mask", "synced_gpus"),
)


def resolve(model, generation_config: GenerationConfig | None, kwargs: dict) -> Any:
    """The call's ``speculative``: argument, then its config, then the model's config."""
    if "speculative" in kwargs:
        value = kwargs.pop("speculative")
    elif generation_config is not None and hasattr(generation_config, "speculative"):
        value = generation_config.speculative  # type: ignore[attr-defined]
    else:
        value = getattr(model.generation_config, "speculative", None)
    return SpeculativeConfig.parse(value)


def resolve_seed(generation_config: GenerationConfig | None, kwargs: dict) -> Any:
    """The call's ``seed``: argument, then its config. Raises `ValueError` for a bad one."""
    seed = kwargs.pop("seed", None)
    if seed is None:
        seed = getattr(generation_config, "seed", None)
    return check_seed(seed)


def carry(
    model, generation_config: GenerationConfig | None, kwargs: dict, settings: dict[str, Any]
) -> GenerationConfig | None:
    """Put our settings where Transformers hands them on: in the call's config, or its arguments."""
    if generation_config is None:
        for name in settings:
            if not hasattr(model.generation_config, name):  # the user assigned another one
                setattr(model.generation_config, name, None)
        kwargs |= settings
        return None
    generation_config = copy.deepcopy(generation_config)
    for name, value in settings.items():
        setattr(generation_config, name, value)
    return generation_config


def serialise(config: SpeculativeConfig | None) -> dict | bool:
    """JSON-safe form that travels on the generation config.

    Plain is False: where a config says None, Transformers fills in the model's default.
    """
    return False if config is None else dataclasses.asdict(config)


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
    if speculative is None:
        return
    for name in _CACHE_NAMES:
        cache = kwargs.get(name)
        if cache is not None and not isinstance(cache, Eagle4Cache):
            raise ValueError(
                f"{name} is a {type(cache).__name__}; with speculative= pass the cache that "
                "eagle4's generate returned, or none"
            )
    _refuse(model, generation_config, kwargs)


def _refuse(model, generation_config: GenerationConfig | None, kwargs: dict) -> None:
    def setting(name: str, *configs: GenerationConfig | None) -> Any:
        if kwargs.get(name) is not None:
            return kwargs[name]
        found = [getattr(config, name, None) for config in configs]
        return next((value for value in found if value is not None), None)

    configs = (generation_config, model.generation_config)
    for name, allowed in _SETTINGS.items():
        value = setting(name, *configs)
        if value not in allowed:
            raise ValueError(f"{name}={value!r} cannot be combined with speculative=")
    # A default that came with the target's checkpoint is no wish of the caller.
    implementation = setting("cache_implementation", generation_config)
    if implementation is not None:
        raise ValueError(
            f"cache_implementation={implementation!r} cannot be combined with speculative=: eagle4 "
            "brings its own paged cache; leave it unset"
        )
    for name in _ARGUMENTS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name} cannot be combined with speculative=")


def uses_engine(
    generation_config: GenerationConfig, model_kwargs: dict, processors: Any = ()
) -> bool:
    """Whether the engine decodes this call: greedy decoding and sampling that it can honour.

    Raises `ValueError` with speculation for what only the prepared call shows.
    """
    is_speculative = bool(getattr(generation_config, "speculative", None))
    reason = _unserved(model_kwargs, processors)
    if reason is not None and is_speculative:
        raise ValueError(f"{reason}; this cannot be combined with speculative=")
    return is_speculative or not (
        reason is not None
        or (generation_config.num_beams or 1) > 1
        or generation_config.output_attentions
        or generation_config.use_cache is False
        or generation_config.cache_implementation is not None
        or generation_config.is_assistant
        or not is_left_padded(model_kwargs.get("attention_mask"))
    )


def check_foreign(model_kwargs: dict) -> None:
    """Raise `ValueError` when decoding that is not the engine's is handed the engine's cache."""
    for name in _CACHE_NAMES:
        if isinstance(model_kwargs.get(name), Eagle4Cache):
            raise ValueError(
                f"{name} is an Eagle4Cache, which only greedy decoding and sampling continue; pass "
                f"{name}=cache.to_dynamic_cache()"
            )


def check_drawing(generation_config: GenerationConfig, is_split: bool) -> None:
    """Raise `ValueError` when decoding that is not the engine's cannot draw as it was asked to.

    ``is_split``: over ranks, of which each would draw with a generator of its own.
    """
    why = "cannot serve this call (another cache or none, output_attentions, guidance, ...)"
    if not generation_config.do_sample:
        return
    if is_split:
        raise ValueError(
            f"under tensor parallelism only eagle4's own decoding samples, and it {why}; use "
            "do_sample=False"
        )
    if getattr(generation_config, "seed", None) is not None:
        raise ValueError(
            f"seed is honoured by eagle4's own decoding only, which {why}; use torch.manual_seed"
        )


def _unserved(model_kwargs: dict, processors: Any) -> str | None:
    """Why the engine cannot decode a prepared call."""
    mask = model_kwargs.get("attention_mask")
    for name in _CACHE_NAMES:
        if not isinstance(model_kwargs.get(name), Eagle4Cache | None):
            return f"{name} is a {type(model_kwargs[name]).__name__}"
    extra = sorted(k for k, v in model_kwargs.items() if v is not None and k not in _SERVED)
    if extra:
        return f"{', '.join(extra)}: only token ids reach the target"
    if not are_default_positions(model_kwargs.get("position_ids"), mask):
        return "position_ids differ from those that the attention_mask implies"
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        return "classifier-free guidance runs the target itself"
    return None


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
    known = num_known(input_ids, mask, generation_config, cache)
    ids = input_ids if cache is None else torch.cat([cache.ids(known, input_ids), input_ids], dim=1)
    pads = left_padding(ids, mask)
    pad = generation_config._pad_token_tensor
    returns_dict = bool(generation_config.return_dict_in_generate)
    return Request(
        input_ids=ids,
        pads=pads,
        processors=processors,
        criteria=criteria,
        max_length=generation_config.max_length + known,
        pad_token=0 if pad is None else int(pad),
        pads_finished=any(hasattr(criterion, "eos_token_id") for criterion in criteria),
        sampler=make_sampler(generation_config, processors, len(ids)),
        max_position=_last_position(target, longest=ids.shape[1] - min(pads)),
        streamer=streamer,
        cache=cache,
        known=known,
        output_scores=returns_dict and bool(generation_config.output_scores),
        output_logits=returns_dict and bool(generation_config.output_logits),
        output_hidden_states=returns_dict and bool(generation_config.output_hidden_states),
    )


def _last_position(target: PreTrainedModel, longest: int) -> int | None:
    """Where the target's context ends, if it does. Raises `ValueError` for a longer prompt."""
    text = target.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ValueError(
            f"the prompt has {longest} tokens but the target's context ends at {limit}; shorten it"
        )
    return limit
