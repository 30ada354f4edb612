"""The nouns that cross rooms: fixed-arity NamedTuples of tensors, and the shape legend.

Shape suffixes used in mathematical code:

    B  sequences in the call        R  packed rows (one token of one sequence)
    N  tree nodes (capacity)        K  children per expanded node / frontier width
    T  tapped target layers         H  hidden width
    V  vocabulary                   C  candidates of the low-rank head
    L  key slots visible to a row   S  depth of a tree

The root of a tree is the last committed token. It is not a node: in ``parent_BN`` it is -1, in
packed verification rows it is row 0 and node ``i`` is row ``i + 1``.
"""

from typing import NamedTuple

import torch


class Tree(NamedTuple):
    """Drafted nodes of every sequence, parents before children.

    Slots at and beyond ``count_B`` are padding: token 0, parent -1, score -inf.
    """

    token_BN: torch.Tensor  # int64 target token ids
    parent_BN: torch.Tensor  # int64 index of the parent node, -1 for the root
    depth_BN: torch.Tensor  # int64, 1 for children of the root
    score_BN: torch.Tensor  # float32 path log-probability, never above the parent's
    count_B: torch.Tensor  # int64 live nodes


class Law(NamedTuple):
    """The laws that a sampled tree's children were drawn from: root in row 0, node i in row i + 1.

    Siblings were drawn without replacement, in the order of their indices.
    """

    token_BRC: torch.Tensor  # int64 distinct candidates
    logp_BRC: torch.Tensor  # float64 log-probabilities, -inf: never drawn


class Drawn(NamedTuple):
    """A tree whose nodes were drawn, not chosen."""

    tree: Tree
    law: Law


class Candidates(NamedTuple):
    """What the drafter proposes after each of its rows, best first."""

    token_RK: torch.Tensor  # int64 target token ids
    logp_RK: torch.Tensor  # float32 log-probability under the law that the drafter reports


class Load(NamedTuple):
    """What a policy knows before a round."""

    num_sequences: int  # live sequences
    context: int = 0  # committed tokens of a sequence, mean
    pending: int = 0  # feature rows that the drafter has not seen, all sequences
    remaining: int = 1 << 30  # tokens that the longest-running sequence may still get

    @property
    def size(self) -> int:
        """Batches that share what is learned: powers of two."""
        return self.num_sequences.bit_length()


class Plan(NamedTuple):
    """What the policy decided for one round."""

    speculative: bool  # False: one plain row per sequence
    max_depth: int  # drafter levels at most
    top_k: int  # children per node and frontier width; 1 is a chain
    max_nodes: int  # nodes verified per sequence at most


class Verdict(NamedTuple):
    """Which nodes the target agreed with, and the token that it adds itself."""

    path_BS: torch.Tensor  # int64 accepted node indices from depth 1 down, -1 beyond the end; S = N
    length_B: torch.Tensor  # int64 accepted nodes
    bonus_B: torch.Tensor  # int64 the target's own next token after the path
