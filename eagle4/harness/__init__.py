"""The harness: how far a round speculates.

In: what is known before and during a round, measured times and verdicts after it. Out: a
`types.Plan`, widths level by level, the nodes to verify. The engine asks and never decides itself.
Always: decisions are exact integer arithmetic on predicted costs; output never depends on them.
"""

from .controller import HarnessPolicy
from .cost import CostTable
from .fixed import FixedPolicy, Policy

__all__ = ["CostTable", "FixedPolicy", "HarnessPolicy", "Policy"]
