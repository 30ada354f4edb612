"""The drafter: target features and tokens in, candidate tokens out.

In: taps ``[R, T, H]`` of verified rows or the parent's state, and the token that follows.
Out: `types.Candidates`, best first, with the probabilities that the drafter really reports.
Always: draft KV of committed rows comes from true target features.
"""

from .model import DraftOutput, Eagle4Drafter

__all__ = ["DraftOutput", "Eagle4Drafter"]
