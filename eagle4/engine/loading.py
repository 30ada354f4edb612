"""From ids, folders, loaded parts or a configuration to a target and a drafter."""

from __future__ import annotations

import logging
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..drafter import Eagle4Drafter
from ..drafter.pairing import check_pair
from ..pair import Eagle4PairConfig, hub_config
from ..parallel import Ranks
from ..parallel.loading import can_load_share, load_share
from ..target import check_target
from ..target.families import is_proven_type

logger = logging.getLogger("eagle4")


def load_target(source: Any, *args: Any, ranks: Ranks | None = None, **kwargs: Any) -> Any:
    """The target of a hub id or a folder; one that is loaded already is given back as it is.

    Of a pair, whose drafter is to be replaced, it is the inner target.

    With ``ranks`` no more is read of what will be split than this rank's share, unless the family
    has to be probed as a whole first.
    """
    if isinstance(source, PreTrainedModel):
        return _alone(source)
    if ranks is not None:
        config = hub_config(source, kwargs)
        if is_proven_type(config.model_type) and can_load_share(config, kwargs):
            return load_share(source, config, ranks, *args, **kwargs)
        logger.info("every rank loads all of %s and keeps its share", source)
    return _alone(AutoModelForCausalLM.from_pretrained(source, *args, **kwargs))


def _alone(model: Any) -> Any:
    return model.target if isinstance(model.config, Eagle4PairConfig) else model


def build_pair(config: Eagle4PairConfig) -> tuple[PreTrainedModel, Eagle4Drafter | None]:
    """Target and drafter of a configuration, with weights still to come."""
    target = AutoModelForCausalLM.from_config(config.text_config)
    drafter = config.drafter_config
    return target, None if drafter is None else Eagle4Drafter(drafter)


def bind_pair(target: PreTrainedModel, drafter: Eagle4Drafter | None, tokenizer: Any) -> None:
    """Move the drafter to the target and lend it embedding and LM head.

    Raises `ValueError` for a target that cannot verify packed rows and for parts that do not fit.
    """
    check_target(target)
    if drafter is not None:
        check_pair(drafter.config, target.config, tokenizer)
        embed: Any = target.get_input_embeddings()
        head: Any = target.get_output_embeddings()
        drafter.to(device=embed.weight.device, dtype=embed.weight.dtype)  # type: ignore[call-arg]
        drafter.bind(embed, head).eval()


def load_drafter(source: Any, target: PreTrainedModel) -> Eagle4Drafter | None:
    """The drafter of a hub id or a folder, made for ``target``; loaded ones and None stay."""
    if source is None or isinstance(source, Eagle4Drafter):
        return source
    return Eagle4Drafter.from_pretrained(source, target_config=target.config)
