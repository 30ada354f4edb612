"""Speculation is an optimisation, never a dependency: what ends it, and how."""

from __future__ import annotations

import logging

import torch

from .call import Call
from .drafter_rows import DraftError

logger = logging.getLogger("eagle4")


def stop_speculating(call: Call, error: Exception) -> None:
    """Decode plainly from here on: counted, and logged once per call.

    Where ranks share the models only a `DraftError` is known to be seen by all of them; anything
    else is raised again, because the others would go on drafting.
    """
    if call.target.vocab is not None and not isinstance(error, DraftError):
        raise error
    reason = f"{type(error).__name__}: {error}"
    if not call.stats.fallbacks:
        logger.warning("speculation failed, decoding goes on without it: %s", reason)
    call.stats.fallbacks[reason] += 1
    call.draft = None
    call.state.forget_drafts()


def is_out_of_memory(error: Exception) -> bool:
    """Whether fewer rows might have worked. The CPU's allocator raises a plain `RuntimeError`."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
