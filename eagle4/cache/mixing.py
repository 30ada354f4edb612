"""What a recurrent layer does with the rows of one packed forward: convolve, then mix.

The counterpart of `step.attend`. A row continues its parent; what lies before the first row is the
committed state. Prompts move that state on, verified rows only leave their inputs in the pool.
"""

from __future__ import annotations

import torch

from ..ops import advance_gdn_, chain_conv, tree_conv, tree_gdn
from .lineage import Lineage
from .recurrent import RecurrentPool, StateRows
from .step import AttentionStep


def convolve(
    pool: RecurrentPool,
    layer: int,
    step: AttentionStep,
    rows_RC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
) -> torch.Tensor:
    """The layer's short convolution, ``[R, C]`` in the rows' dtype, without an activation."""
    lineage, place = _lineage(step), pool.place[layer]
    if lineage.is_prompt:
        parts = rows_RC.split(lineage.counts)
        outputs = []
        for sequence, part in zip(lineage.sequences, parts, strict=True):
            both_LC = _prompt_inputs(pool, place, sequence, part, lineage.snapshot_row)
            outputs.append(chain_conv(both_LC, weight_CW, bias_C))
        return torch.cat(outputs)
    pool.conv_rows[place] = rows_RC
    out_BMC = tree_conv(
        step.pad(rows_RC),
        pool.conv_LSWC[place, lineage.slots],
        weight_CW,
        bias_C,
        lineage.sources(weight_CW.shape[1]),
    )
    return step.unpad(out_BMC)


def mix(
    pool: RecurrentPool, layer: int, step: AttentionStep, query_RGK: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """The layer's recurrence, float32 ``[R, H, V]``; see `ops.tree_gdn`."""
    lineage, place = _lineage(step), pool.place[layer]
    if lineage.is_prompt:
        return _prompt_mix(pool, place, lineage, query_RGK, rows)
    pool.state_rows[place] = rows
    state_SHKV, slot_B, impl = pool.state_LSHKV[place], None, "torch"
    if query_RGK.is_cuda:
        slot_B, impl = lineage.slot_B, "triton"
    else:
        state_SHKV = state_SHKV[lineage.slots]
    rows = rows.map(step.pad)
    out_BMHV = tree_gdn(step.pad(query_RGK), *rows, state_SHKV, lineage.paths, slot_B, impl)
    return step.unpad(out_BMHV)


def _lineage(step: AttentionStep) -> Lineage:
    assert step.lineage is not None, "recurrent layers need a step from build_step"
    return step.lineage


def _prompt_inputs(
    pool: RecurrentPool, place: int, sequence: int, rows_RC: torch.Tensor, snapshot_row: int | None
) -> torch.Tensor:
    """Committed inputs and the prompt's; the last ones become the committed ones."""
    committed_WC = pool.conv_LSWC[place, sequence]
    kept = len(committed_WC)
    both_LC = torch.cat([committed_WC, rows_RC])
    if snapshot_row is not None:
        pool.snapshot().conv_LWC[place] = both_LC[snapshot_row : snapshot_row + kept]
    committed_WC.copy_(both_LC[len(both_LC) - kept :])
    return both_LC


def _prompt_mix(
    pool: RecurrentPool, place: int, lineage: Lineage, query_RGK: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    outputs, row = [], lineage.snapshot_row
    for sequence, first, count in zip(
        lineage.sequences, lineage.first_rows, lineage.counts, strict=True
    ):
        state_1HKV = pool.state_LSHKV[place, sequence].unsqueeze(0)
        end = first + count
        # Up to the snapshot, and on from there.
        for part in (slice(first, end),) if row is None else (slice(0, row), slice(row, end)):
            inputs = rows.map(lambda x, part=part: x[part].unsqueeze(0))
            out_1MHV = advance_gdn_(state_1HKV, *inputs, query_RGK[part].unsqueeze(0))
            assert out_1MHV is not None
            outputs.append(out_1MHV[0])
            if part.stop == row:
                pool.snapshot().state_LHKV[place] = state_1HKV[0]
    return torch.cat(outputs)
