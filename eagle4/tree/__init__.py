"""The tree: pure functions over a fixed-capacity `types.Tree`, parents before children.

In: the drafter's `Candidates` level by level. Out: the best nodes by path score, depth-first, best
child first, with their ancestor matrix. Rejection sampling draws into the slots of a `Template`.
Always: a child's score never exceeds its parent's, so the best n nodes are closed under ancestors.
"""

from ..ops import ancestor_matrix, prune
from .grow import Growth, extend, is_saturated, narrow, start, take
from .template import Template, best_template, keep_slots

__all__ = [
    "Growth",
    "ancestor_matrix",
    "extend",
    "is_saturated",
    "narrow",
    "prune",
    "start",
    "take",
]
__all__ += ["Template", "best_template", "keep_slots"]
