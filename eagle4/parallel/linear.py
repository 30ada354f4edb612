"""Splitting single modules: the rows or columns that a rank keeps, and the sum that joins them.

    column-parallel   y_r = W[rows_r] x + b[rows_r]        every rank has part of the output
    row-parallel      y = sum_r (W[:, columns_r] x_r) + b  every rank has part of the input

A split `nn.Linear` stays an `nn.Linear` with plain weights; the exchange is a forward hook. So
packed CPU weights, casts and moves work on shares as they do on whole layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

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


def split_parameter(owner: nn.Module, name: str, dim: int, share: Share) -> None:
    """Keep a slice of a parameter; a copy, so that the whole can be freed."""
    whole = getattr(owner, name)
    kept = whole.detach().narrow(dim, share.first, share.size).clone()
    setattr(owner, name, nn.Parameter(kept, requires_grad=whole.requires_grad))


def split_outputs(linear: nn.Linear, share: Share) -> None:
    """Column-parallel: keep these rows of the weight and of the bias."""
    split_parameter(linear, "weight", 0, share)
    if linear.bias is not None:
        split_parameter(linear, "bias", 0, share)
    linear.out_features = share.size


def split_inputs(linear: nn.Linear, share: Share, ranks: Ranks) -> None:
    """Row-parallel: keep these columns; the output becomes the sum over all ranks."""
    split_parameter(linear, "weight", 1, share)
    if linear.bias is not None:
        keep_on_first(linear, "bias", ranks)
    linear.in_features = share.size
    sum_output(linear, ranks)


def keep_on_first(owner: nn.Module, name: str, ranks: Ranks) -> None:
    """What is added once, is added by rank 0: the others hold zeros."""
    if not ranks.is_first:
        getattr(owner, name).data = torch.zeros_like(getattr(owner, name))


def sum_output(module: nn.Module, ranks: Ranks) -> None:
    """The module's output is a part of a sum."""

    def joined(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return ranks.all_reduce(output, LAYERS)

    module.register_forward_hook(joined)


def gather_output(module: nn.Module, share: Share, ranks: Ranks) -> None:
    """The module's output is a share of the last axis; everybody gets the whole."""

    def joined(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return gather_last(output, share, ranks, LAYERS)

    module.register_forward_hook(joined)


def slice_input(module: nn.Module, share: Share) -> None:
    """The module gets whole rows and reads its share of the last axis."""

    def sliced(module: nn.Module, args: tuple) -> tuple:
        return (args[0][..., share.first : share.last], *args[1:])

    module.register_forward_pre_hook(sliced)


def gather_last(part: torch.Tensor, share: Share, ranks: Ranks, purpose: str) -> torch.Tensor:
    """Every rank's share of the last axis, side by side: ``[..., total]``."""
    step = -(-share.total // ranks.size)
    padded = nn.functional.pad(part, (0, step - share.size))
    whole = ranks.all_gather(padded, purpose).movedim(0, -2).flatten(-2)
    return whole[..., : share.total]


def split_attention(
    projections: tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ranks: Ranks,
) -> None:
    """Query, key, value and output projection by heads."""
    query, key, value, output = projections
    split_outputs(query, share_of_heads(num_heads, head_dim, ranks))
    for projection in (key, value):
        split_outputs(projection, share_of_heads(num_kv_heads, head_dim, ranks))
    split_inputs(output, share_of_heads(num_heads, head_dim, ranks), ranks)


def split_mlp(
    into: tuple[nn.Linear, ...], out_of: nn.Linear, inner_size: int, ranks: Ranks
) -> None:
    """The layers that lead into the wide middle by outputs, the one out of it by inputs."""
    share = share_of(inner_size, ranks)
    for linear in into:
        split_outputs(linear, share)
    split_inputs(out_of, share, ranks)
