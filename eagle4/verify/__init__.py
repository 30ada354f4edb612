"""Verification: drafted tree and the target's tokens in, `types.Verdict` out.

Always: the committed tokens are what plain decoding would have produced.
"""

from .greedy import verify_greedy

__all__ = ["verify_greedy"]
