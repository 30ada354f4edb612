"""The short causal convolution of recurrent layers, over ancestors instead of neighbours.

    o_i = bias + sum_t weight[W - 1 - t] x(t-th ancestor of i)

The 0th ancestor of a row is the row itself; what lies before the first row comes from the last
W - 1 committed inputs. All rows at once; sums in float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def conv_sources(ancestors_BMM: torch.Tensor, width: int) -> torch.Tensor:
    """int64 ``[B, M, W]``: where the t-th ancestor of every row stands in (committed, rows).

    Committed inputs are entries ``0 .. W - 2``, oldest first; row j is entry ``W - 1 + j``.
    """
    depth_BM = ancestors_BMM.sum(dim=2) - 1
    sources = []
    for back in range(width):
        wanted_BM1 = (depth_BM - back).unsqueeze(2)
        is_it_BMM = ancestors_BMM & (depth_BM.unsqueeze(1) == wanted_BM1)
        row_BM = is_it_BMM.int().argmax(dim=2) + width - 1
        # Before the first row: depth -1 is the newest committed input.
        sources.append(torch.where(depth_BM >= back, row_BM, width - 1 + depth_BM - back))
    return torch.stack(sources, dim=2)


def tree_conv(
    rows_BMC: torch.Tensor,
    committed_BWC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    source_BMW: torch.Tensor,
) -> torch.Tensor:
    """``[B, M, C]`` in the rows' dtype; ``committed_BWC`` holds W - 1 inputs, ``source_BMW``
    comes from `conv_sources`.
    """
    both_BLC = torch.cat([committed_BWC, rows_BMC], dim=1)
    batch, length, _ = both_BLC.shape
    first_B11 = torch.arange(batch, device=rows_BMC.device).view(-1, 1, 1) * length
    source_BMW = source_BMW + first_B11
    flat_LC, weight_CW = both_BLC.flatten(0, 1), weight_CW.float()
    out_BMC = torch.zeros_like(rows_BMC, dtype=torch.float32)
    if bias_C is not None:
        out_BMC += bias_C.float()
    width = weight_CW.shape[1]
    for back in range(width):
        # One tap at a time: all at once would need W times the memory.
        out_BMC.addcmul_(flat_LC[source_BMW[:, :, back]].float(), weight_CW[:, width - 1 - back])
    return out_BMC.to(rows_BMC.dtype)


def chain_conv(
    both_LC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
) -> torch.Tensor:
    """``[L - W + 1, C]``: the same for one chain whose W - 1 committed inputs come first."""
    weight_C1W = weight_CW.unsqueeze(1)
    out_1CL = functional.conv1d(
        both_LC.to(weight_CW.dtype).T.unsqueeze(0), weight_C1W, bias_C, groups=len(weight_CW)
    )
    return out_1CL[0].T.to(both_LC.dtype)
