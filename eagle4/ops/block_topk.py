"""The best k of many scores: exact, in two passes, several times faster than `torch.topk` on a CPU.

A score among the best k lies in one of the k blocks with the largest maxima, because k better
blocks would hold k better scores. So one pass takes block maxima and `torch.topk` sees two short
rows instead of the whole vocabulary.
"""

from __future__ import annotations

import torch

BLOCK = 16


def block_topk(score_RV: torch.Tensor, k: int) -> torch.Tensor:
    """Indices ``[R, k]`` of each row's k largest scores, unordered.

    Among equal scores the choice is arbitrary, as in `torch.topk`. NaN counts as the largest.
    """
    rows, vocab = score_RV.shape
    num_blocks = vocab // BLOCK
    if num_blocks <= 2 * k:
        return score_RV.topk(k, dim=-1, sorted=False).indices
    # Block j is the columns j, j + num_blocks, ...: the maximum runs over whole vectors.
    blocked = score_RV[:, : num_blocks * BLOCK].unflatten(1, (BLOCK, num_blocks))
    block_Rk = blocked.amax(dim=1).topk(k, dim=-1, sorted=False).indices
    inside = blocked.gather(2, block_Rk.unsqueeze(1).expand(-1, BLOCK, -1)).flatten(1)
    offset = torch.arange(BLOCK, device=score_RV.device).unsqueeze(1) * num_blocks
    index = (block_Rk.unsqueeze(1) + offset).flatten(1)
    tail = torch.arange(num_blocks * BLOCK, vocab, device=score_RV.device).expand(rows, -1)
    pool = torch.cat([inside, score_RV[:, num_blocks * BLOCK :]], dim=1)
    chosen = pool.topk(k, dim=-1, sorted=False).indices
    return torch.cat([index, tail], dim=1).gather(1, chosen)
