"""Splitting single modules: the rows or columns that a rank keeps, and the sum that joins them.

    column-parallel   y_r = W[rows_r] x + b[rows_r]        every rank has part of the output
    row-parallel      y = sum_r (W[:, columns_r] x_r) + b  every rank has part of the input

A split `nn.Linear` stays an `nn.Linear` with plain weights, so packed CPU weights, casts and moves
work on shares as they do on whole layers. Where an exchange follows, a module around it makes it:
hooks would differ from layer to layer, and a compiler that compares them would compile every layer
anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .ranks import Ranks

LAYERS = "layers"  # the purpose under which these exchanges are counted


class Share(NamedTuple):
    """``[first, last)`` of an axis of ``total`` entries."""

    first: int
    last: int
    total: int

    @property
    def size(self) -> int:
        return self.last - self.first


def share_of(total: int, ranks: Ranks) -> Share:
    """This rank's run; all are equally long but for the last ones, which may be shorter."""
    step = -(-total // ranks.size)
    return Share(min(ranks.rank * step, total), min((ranks.rank + 1) * step, total), total)


def share_of_heads(num_heads: int, head_dim: int, ranks: Ranks) -> Share:
    """The rows of this rank's heads. Where heads are fewer than ranks, neighbours hold the same."""
    count = max(1, num_heads // ranks.size)
    first = ranks.rank * num_heads // ranks.size
    return Share(first * head_dim, (first + count) * head_dim, num_heads * head_dim)


def split_parameter(
    owner: nn.Module, name: str, dim: int, share: Share, num_groups: int = 1
) -> None:
    """Keep a slice of a parameter; a copy, so that the whole can be freed.

    ``num_groups``: so many runs of ``share.total`` entries lie behind each other, and the same
    slice of each is kept.
    """
    whole = getattr(owner, name)
    if isinstance(whole, DTensor):  # `loading` has read no more than this slice
        kept = whole.to_local().detach()
    else:
        groups = whole.detach().unflatten(dim, (num_groups, share.total))
        kept = groups.narrow(dim + 1, share.first, share.size).flatten(dim, dim + 1).clone()
    setattr(owner, name, nn.Parameter(kept, requires_grad=whole.requires_grad))


def split_outputs(linear: nn.Linear, share: Share) -> None:
    """Column-parallel: keep these rows of the weight and of the bias."""
    split_parameter(linear, "weight", 0, share)
    if linear.bias is not None:
        split_parameter(linear, "bias", 0, share)
    linear.out_features = share.size


def split_inputs(owner: nn.Module, name: str, share: Share, ranks: Ranks, slices: bool) -> None:
    """Row-parallel: keep these columns; the output becomes the sum over all ranks.

    ``slices``: the module is given whole rows and takes its share of them itself.
    """
    linear = getattr(owner, name)
    split_parameter(linear, "weight", 1, share)
    if linear.bias is not None:
        keep_on_first(linear, "bias", ranks)
    linear.in_features = share.size
    setattr(owner, name, Summed(linear, ranks, share if slices else None))


def keep_on_first(owner: nn.Module, name: str, ranks: Ranks) -> None:
    """What is added once, is added by rank 0: the others hold zeros."""
    if not ranks.is_first:
        getattr(owner, name).data = torch.zeros_like(getattr(owner, name))


class Summed(nn.Module):
    """A module whose output is one rank's part of a sum; ``share`` of the input, None all of it."""

    def __init__(self, inner: nn.Module, ranks: Ranks, share: Share | None = None):
        super().__init__()
        self.inner, self.ranks, self.share = inner, ranks, share

    def forward(self, first: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_reduce(self.part(first, *args), LAYERS)

    def part(self, first: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        """This rank's part of the output."""
        if self.share is not None:
            first = first[..., self.share.first : self.share.last]
        return self.inner(first, *args)

    def add_norm(
        self, rows: torch.Tensor, residual: torch.Tensor, norm: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual`` plus the output for these rows, and its norm: in one exchange with it."""
        return self.ranks.sum_add_norm(self.part(rows), residual, norm, LAYERS)

    @property
    def weight(self) -> torch.Tensor:
        """Some families ask a projection for its dtype."""
        return self.inner.weight  # type: ignore[return-value]


class Gathered(Summed):
    """A module whose output is a share of the last axis; everybody gets the whole."""

    def forward(self, first: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        assert self.share is not None
        return gather_last(self.inner(first, *args), self.share, self.ranks, LAYERS)


def gather_last(part: torch.Tensor, share: Share, ranks: Ranks, purpose: str) -> torch.Tensor:
    """Every rank's share of the last axis, side by side: ``[..., total]``."""
    step = -(-share.total // ranks.size)
    padded = nn.functional.pad(part, (0, step - share.size))
    whole = ranks.all_gather(padded, purpose).movedim(0, -2).flatten(-2)
    return whole[..., : share.total]
