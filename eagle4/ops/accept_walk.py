"""The longest path of a tree whose tokens are the target's own choices.

Which token the target chose behind a row is decided before (argmax, `draw_rows` or
`rejection_rows`); the walk is the same for all of them.
"""

from __future__ import annotations

import torch

from ..types import Tree, Verdict
from .bits import WORD
from .dispatch import wants_triton


def accept_walk(
    tree: Tree, ancestors_BNN: torch.Tensor, choice_BR: torch.Tensor, impl: str = "auto"
) -> Verdict:
    """Verdict for the target's tokens ``choice_BR`` behind the root (column 0) and every node.

    A node is accepted when its token is the choice at its parent and all its ancestors are
    accepted. A node whose own choice is unknown (-1) is not: nothing could follow it. Two siblings
    with the same token cannot both extend the path: the deepest accepted node wins, the first one
    at equal depth. ``path_BS`` has a column per node, -1 beyond the end.
    """
    batch, nodes = tree.token_BN.shape
    if not nodes:
        none_B = choice_BR.new_zeros(batch)
        return Verdict(choice_BR[:, :0], none_B, choice_BR[:, 0])
    if wants_triton(impl, choice_BR, fits=lambda: nodes <= WORD):
        from .triton.accept_walk import accept_walk as kernel

        return kernel(tree, ancestors_BNN, choice_BR)
    live_BN = (tree.depth_BN > 0) & (choice_BR[:, 1:] >= 0)
    agrees_BN = live_BN & (tree.token_BN == choice_BR.gather(1, tree.parent_BN + 1))
    accepted_BN = agrees_BN & (ancestors_BNN <= agrees_BN.unsqueeze(1)).all(dim=2)
    length_B, last_B = torch.where(accepted_BN, tree.depth_BN, 0).max(dim=1)
    row_B = torch.where(length_B > 0, last_B + 1, 0)
    bonus_B = choice_BR.gather(1, row_B.unsqueeze(1)).squeeze(1)
    on_path_BN = ancestors_BNN[torch.arange(batch, device=last_B.device), last_B] & accepted_BN
    return Verdict(_path(tree, on_path_BN), length_B, bonus_B)


def _path(tree: Tree, on_path_BN: torch.Tensor) -> torch.Tensor:
    """Accepted node indices by depth, -1 beyond the end: ``[B, N]``."""
    batch, nodes = on_path_BN.shape
    path_BS = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=on_path_BN.device)
    index_BN = torch.arange(nodes, device=on_path_BN.device).expand_as(on_path_BN)
    column_BN = torch.where(on_path_BN, tree.depth_BN - 1, nodes)
    path_BS.scatter_(1, column_BN, torch.where(on_path_BN, index_BN, -1))
    return path_BS[:, :nodes]
