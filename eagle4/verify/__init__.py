"""Verification: drafted tree and the target's scores in, `types.Verdict` out.

Always: the committed tokens are what plain decoding would have produced; with rejection sampling,
follow the law of what it would have produced. Greedy, coupled and rejection differ in which token
they choose behind a row; the verdict is the longest path of chosen tokens for all of them.
"""

from .coupled import choose_coupled
from .greedy import verify_greedy
from .rejection import Outside, choose_rejection, choose_rejection_apart

__all__ = ["Outside", "choose_coupled", "choose_rejection", "choose_rejection_apart"]
__all__ += ["verify_greedy"]
