"""`Eagle4PairConfig`: the configuration of a saved target/drafter pair.

The inner target configuration is called ``text_config``, the name through which Transformers'
generation, cache and pipeline code finds vocabulary size and layer types of a composite model.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from .config import Eagle4Config


class Eagle4PairConfig(PreTrainedConfig):
    """Target configuration and, if there is one, drafter configuration."""

    model_type = "eagle4_pair"
    sub_configs = {"text_config": AutoConfig, "drafter_config": Eagle4Config}  # type: ignore

    def __init__(
        self,
        text_config: PreTrainedConfig | dict[str, Any] | None = None,
        drafter_config: Eagle4Config | dict[str, Any] | None = None,
        **kwargs,
    ):
        if isinstance(text_config, dict):
            values = dict(text_config)
            text_config = AutoConfig.for_model(values.pop("model_type"), **values)
        if isinstance(drafter_config, dict):
            values = {k: v for k, v in drafter_config.items() if k != "model_type"}
            drafter_config = Eagle4Config(**values)
        self.text_config = text_config
        self.drafter_config = drafter_config
        super().__init__(**kwargs)

    @classmethod
    def of(cls, target: PreTrainedModel, drafter: PreTrainedModel | None) -> Eagle4PairConfig:
        """The configuration of loaded parts."""
        drafter_config: Any = None if drafter is None else drafter.config
        # A copy: Transformers writes the attention choice of the whole into its sub-configs.
        return cls(text_config=copy.deepcopy(target.config), drafter_config=drafter_config)


def hub_config(source: Any, kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a folder or hub id.

    ``kwargs`` of `from_pretrained` may hold it, or say which revision, with which token, from which
    cache.
    """
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")
    where = {name: kwargs[name] for name in names if name in kwargs}
    return kwargs.get("config") or AutoConfig.from_pretrained(source, **where)


def is_pair(source: Any, drafter: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of `from_pretrained` name a folder with target and drafter together."""
    is_single = drafter is None and not isinstance(source, PreTrainedModel)
    return is_single and hub_config(source, kwargs).model_type == Eagle4PairConfig.model_type


def check_complete(path: str | os.PathLike, info: dict[str, Any]) -> None:
    """Raise `ValueError` when a loaded pair lacks tensors or found others than its own.

    Transformers would initialise what is missing at random and only warn.
    """
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = [f"{kind}: {sorted(map(str, info[kind]))}" for kind in kinds if info.get(kind)]
    if wrong:
        raise ValueError(f"{path} does not hold the pair that its config describes; {wrong}")


def speculative_defaults(like: GenerationConfig | None) -> GenerationConfig:
    """A copy with places for ``speculative`` and ``seed``, of a kind that keeps them when saved."""
    config = GenerationConfig() if like is None else copy.deepcopy(like)
    config._from_model_config = False
    for name in ("speculative", "seed"):
        if not hasattr(config, name):
            setattr(config, name, None)
    return config


AutoConfig.register(Eagle4Config.model_type, Eagle4Config, exist_ok=True)
AutoConfig.register(Eagle4PairConfig.model_type, Eagle4PairConfig, exist_ok=True)
