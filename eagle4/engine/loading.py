"""From ids, folders or loaded parts to a target and a drafter."""

from __future__ import annotations

import logging
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..drafter import Eagle4Drafter
from ..pair import hub_config
from ..parallel import Ranks
from ..parallel.loading import can_load_share, load_share
from ..target.families import is_proven_type

logger = logging.getLogger("eagle4")


def load_target(source: Any, *args: Any, ranks: Ranks | None = None, **kwargs: Any) -> Any:
    """The target of a hub id or a folder; one that is loaded already is given back as it is.

    With ``ranks`` no more is read of what will be split than this rank's share, unless the family
    has to be probed as a whole first.
    """
    if isinstance(source, PreTrainedModel):
        return source
    if ranks is not None:
        config = hub_config(source, kwargs)
        if is_proven_type(config.model_type) and can_load_share(config, kwargs):
            return load_share(source, config, ranks, *args, **kwargs)
        logger.info("every rank loads all of %s and keeps its share", source)
    return AutoModelForCausalLM.from_pretrained(source, *args, **kwargs)


def load_drafter(source: Any, target: PreTrainedModel) -> Eagle4Drafter | None:
    """The drafter of a hub id or a folder, made for ``target``; loaded ones and None stay."""
    if source is None or isinstance(source, Eagle4Drafter):
        return source
    return Eagle4Drafter.from_pretrained(source, target_config=target.config)
