"""The longest path whose tokens are the target's own choices.

Greedy decoding chooses the argmax, which is all there is to its verification; sampling chooses with
`coupled` or `rejection`.
"""

from __future__ import annotations

import torch

from ..ops import accept_walk
from ..types import Tree, Verdict


def verify_greedy(tree: Tree, ancestors_BNN: torch.Tensor, choice_BR: torch.Tensor) -> Verdict:
    """Verdict for the tokens ``choice_BR`` behind the root and every node: `ops.accept_walk`."""
    return accept_walk(tree, ancestors_BNN, choice_BR)
