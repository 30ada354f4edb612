"""Sets of small indices as int64 words: index j is bit ``j % 64`` of word ``j // 64``."""

from __future__ import annotations

import torch
from torch.nn import functional as F

WORD = 64


def pack_bits(member: torch.Tensor) -> torch.Tensor:
    """bool ``[..., W]`` to int64 ``[..., ceil(W / 64)]``."""
    width = member.shape[-1]
    padded = F.pad(member, (0, -width % WORD)).unflatten(-1, (-1, WORD))
    weight = torch.ones((), dtype=torch.int64, device=member.device) << torch.arange(
        WORD, device=member.device
    )
    return torch.where(padded, weight, 0).sum(dim=-1)


def unpack_bits(words: torch.Tensor, width: int) -> torch.Tensor:
    """int64 ``[..., X]`` to bool ``[..., width]``, ``width <= 64 X``."""
    index = torch.arange(WORD, device=words.device)
    return ((words.unsqueeze(-1) >> index) & 1).bool().flatten(-2)[..., :width]
