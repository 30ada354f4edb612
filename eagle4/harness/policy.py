"""Policies: the seam where a `Plan` comes from.

`FixedPolicy` drafts to a configured depth and stops early only when another level provably cannot
change the verified tree.
"""

from __future__ import annotations

from typing import Protocol

from ..config import SpeculativeConfig
from ..types import Plan


class Policy(Protocol):
    """What the engine asks of a harness."""

    def plan(self, num_sequences: int) -> Plan:
        """The plan of the next round for that many live sequences."""
        ...

    def go_deeper(self, plan: Plan, depth: int, saturated: bool) -> bool:
        """Whether to draft level ``depth + 1``; ``saturated``: it cannot enter the tree."""
        ...


class FixedPolicy:
    """Always the configured depth, width and node count."""

    def __init__(self, config: SpeculativeConfig):
        self._plan = Plan(True, config.max_depth, config.width, config.max_nodes)

    def plan(self, num_sequences: int) -> Plan:
        return self._plan

    def go_deeper(self, plan: Plan, depth: int, saturated: bool) -> bool:
        return depth < plan.max_depth and not saturated
