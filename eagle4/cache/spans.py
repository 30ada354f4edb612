"""How attention finds a sequence's entries in the pool: as a run of slots, or slot by slot."""

from __future__ import annotations

import torch

from ..ops import page_slots
from .pages import PageTable


def spans(
    table: PageTable,
    spanned: list[tuple[int, int]],
    longest: int,
    device: torch.device,
    gathers: bool = False,
    bucketed: bool = False,
) -> tuple[tuple[int, int] | None, torch.Tensor | None]:
    """How to read the first entries of every (sequence, entries): as a run, or by ``slot_BL``.

    A run is (start, stride): all sequences are contiguous and equally spaced, in order. With
    ``gathers`` several sequences always go by slots, so that a compiler meets one case; with
    ``bucketed`` all do, because ``longest`` may reach beyond what a sequence owns.
    """
    by_slots = bucketed or (gathers and len(spanned) > 1)
    run = None if by_slots else _uniform_run(table, spanned, longest)
    if run is not None:
        return run, None
    pages = table.padded([sequence for sequence, _ in spanned], -(-longest // table.page_size))
    slot_BL = page_slots(torch.tensor(pages, device=device), table.page_size)[:, :longest]
    if bucketed:  # a sequence's first entry stands for what it has not got
        length_B1 = torch.tensor([[entries] for _, entries in spanned], device=device)
        is_own_BL = torch.arange(longest, device=device) < length_B1
        slot_BL = torch.where(is_own_BL, slot_BL, slot_BL[:, :1])
    return None, slot_BL.contiguous()


def _uniform_run(
    table: PageTable, spanned: list[tuple[int, int]], longest: int
) -> tuple[int, int] | None:
    starts = [table.run_start(sequence) for sequence, _ in spanned]
    if starts[0] is None or any(start is None for start in starts):
        return None
    if len(starts) == 1:
        return (starts[0], 0)
    stride = starts[1] - starts[0]  # type: ignore[operator]
    if stride < longest or starts[0] + len(starts) * stride > table.num_slots:
        return None
    if any(s != starts[0] + i * stride for i, s in enumerate(starts)):
        return None
    return (starts[0], stride)
