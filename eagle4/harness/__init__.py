"""The harness: how far a round speculates.

In: what is known before and during a round. Out: a `types.Plan`, and after every level whether to
go deeper. The engine asks a policy object and never decides itself.
"""

from .policy import FixedPolicy, Policy

__all__ = ["FixedPolicy", "Policy"]
