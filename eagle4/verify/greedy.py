"""The longest path whose tokens are the target's own choices.

Greedy decoding chooses the argmax, which is all there is to its verification; sampling chooses with
`coupled` or `rejection`.
"""

from __future__ import annotations

import torch

from ..types import Tree, Verdict


def verify_greedy(tree: Tree, ancestors_BNN: torch.Tensor, choice_BR: torch.Tensor) -> Verdict:
    """Verdict for the target's tokens ``choice_BR`` behind the root (column 0) and every node.

    A node is accepted when its token is the choice at its parent and all its ancestors are
    accepted. A node whose own choice is unknown (-1) is not: nothing could follow it. Two siblings
    with the same token cannot both extend the path: the deepest accepted node wins, the first one
    at equal depth.
    """
    nodes = tree.token_BN.shape[1]
    live_BN = (tree.depth_BN > 0) & (choice_BR[:, 1:] >= 0)
    agrees_BN = live_BN & (tree.token_BN == choice_BR.gather(1, tree.parent_BN + 1))
    accepted_BN = agrees_BN & (ancestors_BNN <= agrees_BN.unsqueeze(1)).all(dim=2)
    depth_BN = torch.where(accepted_BN, tree.depth_BN, 0)
    length_B, last_B = depth_BN.max(dim=1) if nodes else (choice_BR.new_zeros(len(choice_BR)),) * 2
    row_B = torch.where(length_B > 0, last_B + 1, 0)
    bonus_B = choice_BR.gather(1, row_B.unsqueeze(1)).squeeze(1)
    on_path_BN = ancestors_BNN[torch.arange(len(last_B)), last_B] & accepted_BN if nodes else None
    return Verdict(_path(tree, on_path_BN, length_B), length_B, bonus_B)


def _path(tree: Tree, on_path_BN: torch.Tensor | None, length_B: torch.Tensor) -> torch.Tensor:
    """Accepted node indices by depth, -1 beyond the end: ``[B, S]``."""
    batch = len(length_B)
    deepest = int(length_B.max()) if batch else 0
    path_BS = torch.full((batch, deepest + 1), -1, dtype=torch.int64, device=length_B.device)
    if on_path_BN is not None:
        index_BN = torch.arange(on_path_BN.shape[1], device=length_B.device).expand_as(on_path_BN)
        column_BN = torch.where(on_path_BN, tree.depth_BN - 1, deepest)
        path_BS.scatter_(1, column_BN, torch.where(on_path_BN, index_BN, -1))
    return path_BS[:, :deepest]
