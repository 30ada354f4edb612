"""Tensor parallelism: one share of a built model per process, decisions that all of them share.

In: a loaded target or drafter and a group of ranks. Out: the same modules with this rank's share of
the weights, collectives that are counted, and rows of logits of which every rank holds a part.
Always: whatever steers control flow is computed from bits that are identical on all ranks, and a
rank that dies or falls silent ends the others with a `RankError`, never with a hang.
"""

from .ranks import RankError, Ranks
from .target import shard_target
from .vocabulary import VocabShard

__all__ = ["RankError", "Ranks", "VocabShard", "shard_target"]
