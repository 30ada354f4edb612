"""What the loop tells the policy: the load before a round, tokens and times after it."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ..harness import HarnessPolicy
from ..types import Load
from .call import Call
from .state import Sequence

MOST_PENDING = 1024  # feature rows per sequence kept for a drafter that may never be asked

logger = logging.getLogger("eagle4")


class Before(NamedTuple):
    """A round's beginning."""

    sequences: list[Sequence]
    lengths: list[int]
    seconds: dict[str, float]


def before_round(call: Call, sequences: list[Sequence]) -> Before:
    """Note where the sequences and the clocks stand."""
    return Before(sequences, [s.length for s in sequences], dict(call.stats.seconds))


def load_of(call: Call, sequences: list[Sequence]) -> Load:
    """The load that the next round meets."""
    most = max(call.request.max_length - s.pad - s.length for s in sequences)
    return Load(
        num_sequences=len(sequences),
        context=sum(s.length for s in sequences) // len(sequences),
        pending=sum(s.num_pending for s in sequences),
        remaining=most,
    )


def report_round(call: Call, before: Before, is_planned: bool) -> None:
    """Tell the policy what came of its plan, and bound what waits for the drafter."""
    if call.policy is None or call.draft is None or not is_planned:
        return
    is_plain = isinstance(call.policy, HarnessPolicy) and call.policy.is_plain
    rows = [] if is_plain else zip(before.sequences, before.lengths, strict=True)
    tokens = [call.state.committed(sequence, length) for sequence, length in rows]
    stage_ns = {
        name: int(1e9 * (total - before.seconds.get(name, 0.0)))
        for name, total in call.stats.seconds.items()
    }
    call.policy.observe(tokens, stage_ns)
    if is_plain:
        _bound_pending(call, before.sequences)


def _bound_pending(call: Call, sequences: list[Sequence]) -> None:
    """Where speculation does not pay, not even a look at it, features do not pile up for ever."""
    if max(min(s.num_pending, s.new_tokens) for s in sequences) > MOST_PENDING:
        call.draft = None
        call.state.forget_drafts()
        call.stats.fallbacks["speculation did not pay for long"] += 1
        logger.info("speculation did not pay for long; the call ends in plain mode")
