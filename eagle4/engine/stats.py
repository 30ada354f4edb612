"""What a generation did: rounds, acceptance, time by stage, fallbacks.

Definitions. ``accept_length`` (tau): committed tokens per target verification and sequence, bonus
included, over speculative rounds; the prefill's token is not counted. ``acceptance_by_depth[d]``:
accepted nodes at depth d + 1 divided by the sequence-rounds that verified that depth.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class SpeculationStats:
    """Counters of one `generate` call."""

    rounds: int = 0  # target forwards after prefill
    plain_rounds: int = 0  # of these, without drafted nodes
    target_calls: int = 0  # all target forwards, prefill chunks included
    draft_calls: int = 0  # drafter forwards
    nodes_drafted: int = 0  # nodes that the drafter proposed
    nodes_verified: int = 0  # nodes that the target verified
    new_tokens: int = 0  # committed tokens of all sequences
    verifications: int = 0  # speculative sequence-rounds, the denominator of accept_length
    accepted_per_round: list[list[int]] = field(default_factory=list)  # per round, per sequence
    fallbacks: Counter[str] = field(default_factory=Counter)  # reason -> count
    seconds: Counter[str] = field(default_factory=Counter)  # stage -> time
    host_reads: Counter[str] = field(default_factory=Counter)  # what the host waited for -> times
    harness: dict[str, Any] | None = None  # what the harness decided; None without it
    exchange: dict[str, Any] | None = None  # what ranks sent each other; None on one process
    _drafted_depth: Counter[int] = field(default_factory=Counter)
    _accepted_depth: Counter[int] = field(default_factory=Counter)
    _committed: int = 0  # tokens committed by speculative sequence-rounds

    @property
    def accept_length(self) -> float:
        """Committed tokens per verification; 1.0 when nothing was speculated."""
        return self._committed / self.verifications if self.verifications else 1.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Acceptance at depth 1, 2, ... given that this depth was verified."""
        deepest = max(self._drafted_depth, default=0)
        return [self._accepted_depth[d] / self._drafted_depth[d] for d in range(1, deepest + 1)]

    @property
    def drafted_by_depth(self) -> list[int]:
        """Sequence-rounds that verified depth 1, 2, ...: denominators of `acceptance_by_depth`."""
        return [self._drafted_depth[d] for d in range(1, max(self._drafted_depth, default=0) + 1)]

    def record(self, verified_depth: int, accepted: int, committed: int) -> None:
        """One sequence of one speculative round.

        ``committed`` counts the tokens that were kept, so a stop inside the block shortens it.
        """
        self.verifications += 1
        self._committed += committed
        for depth in range(1, verified_depth + 1):
            self._drafted_depth[depth] += 1
            self._accepted_depth[depth] += accepted >= depth

    def read(self, name: str, value: torch.Tensor) -> list[Any]:
        """``value`` as numbers: the host waits for the device."""
        self.host_reads[name] += 1
        return value.tolist()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``seconds[name]`` (host time)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        names = ("rounds", "plain_rounds", "target_calls", "draft_calls", "nodes_drafted")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return values | {
            "nodes_verified": self.nodes_verified,
            "new_tokens": self.new_tokens,
            "accept_length": self.accept_length,
            "acceptance_by_depth": self.acceptance_by_depth,
            "fallbacks": dict(self.fallbacks),
            "seconds": dict(self.seconds),
            "host_reads": dict(self.host_reads),
            "harness": self.harness,
            "exchange": self.exchange,
        }
