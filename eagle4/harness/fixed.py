"""The seam where a `Plan` comes from, and the policy that always plans the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..config import SpeculativeConfig
from ..types import Load, Plan


class Policy(Protocol):
    """What the engine asks of a harness, and what it tells it afterwards."""

    def plan(self, load: Load) -> Plan:
        """The plan of the next round."""
        ...

    def observe(self, tokens: Sequence[Sequence[int]], stage_ns: Mapping[str, int]) -> None:
        """The round is over: what it committed (if it speculated), nanoseconds per stage."""
        ...


class FixedPolicy:
    """Always the configured depth, width and node count."""

    def __init__(self, config: SpeculativeConfig):
        self._plan = Plan(True, config.max_depth, config.width, config.max_nodes)

    def plan(self, load: Load) -> Plan:
        return self._plan

    def observe(self, tokens: Sequence[Sequence[int]], stage_ns: Mapping[str, int]) -> None:
        """Nothing is learned."""
