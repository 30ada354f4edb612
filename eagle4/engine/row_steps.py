"""Attention steps of rows that each own ``capacity`` consecutive slots of the pool.

A row's place ``p`` has the slots ``p * capacity ...``, so all rows together are one view.
"""

from __future__ import annotations

import torch

from ..cache import AttentionStep, Window
from ..cache.lineage import Lineage


def token_step(
    places: list[int], kv_length_B: torch.Tensor, num_rows: int, capacity: int
) -> AttentionStep:
    """One new row per place; a view of the pool while every place is taken, else a gather."""
    device, batch = kv_length_B.device, len(places)
    longest = int(kv_length_B.max()) + 1
    first_B1 = torch.tensor(places, device=device)[:, None] * capacity
    index_L = torch.arange(longest, device=device)
    is_full = batch == num_rows
    return AttentionStep(
        slot_R=first_B1[:, 0] + kv_length_B,
        position_R=kv_length_B,
        pad_BM=torch.arange(batch, device=device)[:, None],
        unpad_R=torch.arange(batch, device=device),
        visible_BML=(index_L <= kv_length_B[:, None])[:, None],
        query_position_BM=kv_length_B[:, None],
        key_position_BL=index_L.expand(batch, -1),
        run=(0, capacity) if is_full else None,
        slot_BL=None if is_full else first_B1 + index_L,
        lineage=_lineage(places, kv_length_B.tolist(), [1] * batch, device, is_prompt=False),
    )


def prompt_step(
    places: list[int], lengths: list[int], capacity: int, device: torch.device
) -> AttentionStep:
    """All tokens of new prompts, which nothing precedes."""
    batch, most = len(places), max(lengths)
    index_M = torch.arange(most, device=device)
    length_B1 = torch.tensor(lengths, device=device)[:, None]
    is_real_BM = index_M < length_B1
    slot_BM = torch.tensor(places, device=device)[:, None] * capacity + index_M
    position_BM = index_M.expand(batch, -1)
    start_B1 = length_B1.cumsum(0) - length_B1
    return AttentionStep(
        slot_R=slot_BM[is_real_BM],
        position_R=position_BM[is_real_BM],
        pad_BM=start_B1 + torch.minimum(index_M, length_B1 - 1),
        unpad_R=is_real_BM.flatten().nonzero()[:, 0],
        visible_BML=(index_M <= index_M[:, None]).expand(batch, -1, -1),
        query_position_BM=position_BM,
        key_position_BL=position_BM,
        run=None,
        slot_BL=slot_BM,
        lineage=_lineage(places, [0] * batch, lengths, device, is_prompt=True),
    )


def _lineage(
    places: list[int],
    prefixes: list[int],
    counts: list[int],
    device: torch.device,
    is_prompt: bool,
) -> Lineage:
    """Every row follows the one before it: for layers with recurrent state."""
    windows = []
    for place, prefix, count in zip(places, prefixes, counts, strict=True):
        position = torch.arange(prefix, prefix + count, device=device)
        visible = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        windows.append(Window(place, prefix, 0, position, visible))
    return Lineage(windows, is_prompt)
