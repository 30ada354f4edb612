"""One packed forward as attention sees it: where rows write and what they may read.

A row of sequence b sees the committed prefix (indices below ``prefix``) and those window entries
that ``Window.visible`` names: its ancestors and itself. Positions are carried separately, because a
drafted token's position is its depth, not its index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import PagedView, Share, fold_visible, has_kernels
from .buckets import bucket_length
from .layer import LayerStep, attend_layer, pad, unpad
from .lineage import Lineage
from .paged import paged_view
from .pages import PageTable
from .pool import KVPool
from .reach import Reach, find_reaches, windowed
from .spans import spans


class Window(NamedTuple):
    """What one sequence contributes to a packed forward."""

    sequence: int  # row of the page table
    prefix: int  # committed entries, all visible
    offset: int  # window index of this step's first row; earlier entries are already stored
    position: torch.Tensor  # int64 [w] positions of all window entries, stored and new
    visible: torch.Tensor  # bool [n, w] which window entries each new row sees (itself included)


class StepParts(NamedTuple):
    """An `AttentionStep` as tensors and constants, without what recurrent layers need."""

    slot_R: torch.Tensor
    position_R: torch.Tensor
    pad_BM: torch.Tensor | None
    unpad_R: torch.Tensor | None
    visible_BML: torch.Tensor
    query_position_BM: torch.Tensor
    key_position_BL: torch.Tensor
    run: tuple[int, int] | None
    slot_BL: torch.Tensor | None
    view: PagedView | None
    page_size: int


class AttentionStep:
    """Index tensors of one packed forward, shared by all layers.

    ``slot_R`` where rows are written; ``position_R`` their positions; ``visible_BML`` what every
    row sees, where M pads every sequence to the same number of rows. With a ``view`` keys are read
    in their pages, with ``reaches`` in their runs of slots, one sequence at a time; L is 0 then.
    ``lineage`` is for recurrent layers.
    """

    def __init__(
        self,
        slot_R: torch.Tensor,
        position_R: torch.Tensor,
        pad_BM: torch.Tensor | None,
        unpad_R: torch.Tensor | None,
        visible_BML: torch.Tensor,
        query_position_BM: torch.Tensor,
        key_position_BL: torch.Tensor,
        run: tuple[int, int] | None,
        slot_BL: torch.Tensor | None,
        lineage: Lineage | None = None,
        view: PagedView | None = None,
        page_size: int = 0,
        reaches: list[Reach] | None = None,
    ):
        self.slot_R = slot_R
        self.position_R = position_R
        self.pad_BM = pad_BM
        self.unpad_R = unpad_R
        self.visible_BML = visible_BML
        self.query_position_BM = query_position_BM
        self.key_position_BL = key_position_BL
        self.run = run
        self.slot_BL = slot_BL
        self.lineage = lineage
        self.view = view
        self.page_size = page_size
        self.reaches = reaches
        self._folded: dict[tuple, torch.Tensor] = {}
        self._shares: dict[tuple, list[Share]] = {}

    @classmethod
    def of(cls, parts: StepParts) -> AttentionStep:
        """From its `parts`."""
        return cls(**parts._asdict())

    @property
    def parts(self) -> StepParts:
        return StepParts(*(getattr(self, name) for name in StepParts._fields))

    @property
    def shape(self) -> torch.Size:
        """(B, M, L)."""
        return self.visible_BML.shape

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Packed ``[R, ...]`` to ``[B, M, ...]``; padding repeats a sequence's first row."""
        return pad(rows, self.pad_BM)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """``[B, M, ...]`` back to packed ``[R, ...]``."""
        return unpad(padded, self.unpad_R)

    def layer(
        self,
        keys_SHD: torch.Tensor,
        values_SHD: torch.Tensor,
        groups: int,
        sliding_window: int | None = None,
    ) -> LayerStep:
        """What one layer with these pools and ``groups`` query heads per key head needs."""
        own = LayerStep(keys_SHD, values_SHD, self.slot_R, self.pad_BM, self.unpad_R)
        if self.view is not None:
            return own._replace(view=self.view, page_size=self.page_size)
        if self.reaches is not None:
            return own._replace(shares=self.shares(sliding_window, groups, keys_SHD.dtype))
        start, stride = self.run or (0, 0)
        mask = self.mask(sliding_window, groups, keys_SHD.dtype)
        return own._replace(slot_BL=self.slot_BL, start=start, stride=stride, mask=mask)

    def mask(self, sliding_window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """The visibility as `ops.tree_attention` adds it, made once for all layers alike."""
        key = sliding_window, groups, dtype
        if key not in self._folded:
            seen = windowed(
                self.visible_BML, self.query_position_BM, self.key_position_BL, sliding_window
            )
            self._folded[key] = fold_visible(seen, groups, dtype)
        return self._folded[key]

    def shares(self, sliding_window: int | None, groups: int, dtype: torch.dtype) -> list[Share]:
        """What `ops.ragged_attention` takes, made once for all layers alike."""
        key = sliding_window, groups, dtype
        if key not in self._shares:
            self._shares[key] = [reach.share(*key) for reach in self.reaches or ()]
        return self._shares[key]


def build_step(
    table: PageTable,
    windows: list[Window],
    device: torch.device,
    is_prompt: bool = False,
    paged: bool | None = None,
    gathers: bool = False,
    bucketed: bool = False,
) -> AttentionStep:
    """Index tensors for rows packed in the order of ``windows``.

    ``is_prompt``: the rows are chains of prompt tokens, which recurrent layers commit as they run.
    ``paged``: read keys in their pages; None: where a kernel can do that. ``gathers``: see `spans`.
    ``bucketed``: the context's length is rounded up, so that shapes repeat.
    """
    rows = [window.visible.shape[0] for window in windows]
    lengths = [window.prefix + window.visible.shape[1] for window in windows]
    most, longest = max(rows), bucket_length(max(lengths), bucketed)
    rows_in = _packed(table, windows, rows, device)
    _, position_R, pad_BM, _ = rows_in
    query_position_BM = position_R.unsqueeze(0) if pad_BM is None else position_R[pad_BM]
    lineage = Lineage(windows, is_prompt)
    if has_kernels(device) if paged is None else paged:
        view = paged_view(table, windows, query_position_BM, bucketed)
        nothing = *_nothing(query_position_BM), (0, 0), None
        return AttentionStep(*rows_in, *nothing, lineage, view, table.page_size)
    # On accelerators a call per sequence costs more than gathering.
    reaches = None
    if device.type == "cpu" and not gathers and not bucketed:
        reaches = find_reaches(table, windows, position_R)
    if reaches is not None:
        nothing = *_nothing(query_position_BM), None, None
        return AttentionStep(*rows_in, *nothing, lineage, reaches=reaches)
    visible_BML, key_position_BL = _visibility(windows, most, longest, device)
    spanned = [(w.sequence, length) for w, length in zip(windows, lengths, strict=True)]
    run, slot_BL = spans(table, spanned, longest, device, gathers, bucketed)
    keys_in = visible_BML, query_position_BM, key_position_BL, run, slot_BL
    return AttentionStep(*rows_in, *keys_in, lineage)


def _packed(table: PageTable, windows: list[Window], rows: list[int], device: torch.device):
    """Slots and positions of the rows, and how they are padded to equally many per sequence."""
    slots: list[int] = []
    for window, count in zip(windows, rows, strict=True):
        first = window.prefix + window.offset
        slots += table.slots(window.sequence, first, first + count)
    position_R = torch.cat([w.position[w.offset : w.offset + w.visible.shape[0]] for w in windows])
    pad_BM = unpad_R = None
    if len(windows) > 1:
        pad_BM, unpad_R = _padding(rows, max(rows), device)
    return torch.tensor(slots, device=device), position_R, pad_BM, unpad_R


def _nothing(position_BM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """No visible keys, for steps that read them in place."""
    unseen_BML = torch.zeros(*position_BM.shape, 0, dtype=torch.bool, device=position_BM.device)
    return unseen_BML, position_BM, position_BM[:, :0]


def _padding(rows: list[int], most: int, device: torch.device):
    pad, unpad, first = [], [], 0
    for b, count in enumerate(rows):
        pad.append([first + i if i < count else first for i in range(most)])
        unpad += [b * most + i for i in range(count)]
        first += count
    return torch.tensor(pad, device=device), torch.tensor(unpad, device=device)


def _visibility(windows: list[Window], most: int, longest: int, device: torch.device):
    index_L = torch.arange(longest, device=device)
    prefix_B = torch.tensor([window.prefix for window in windows], device=device)
    visible_BML = (index_L < prefix_B[:, None, None]).repeat(1, most, 1)
    key_position_BL = index_L.repeat(len(windows), 1)
    for b, window in enumerate(windows):
        count, width = window.visible.shape
        columns = slice(window.prefix, window.prefix + width)
        visible_BML[b, :count, columns] = window.visible
        visible_BML[b, count:, columns] = window.visible[0]
        key_position_BL[b, columns] = window.position
    return visible_BML, key_position_BL


def attend(
    pool: KVPool,
    layer: int,
    step: AttentionStep,
    query_RHD: torch.Tensor,
    key_RHD: torch.Tensor,
    value_RHD: torch.Tensor,
    *,
    sliding_window: int | None = None,
    **options,
) -> torch.Tensor:
    """Store the rows' K/V in their slots, then attend: ``[R, Hq, D]`` -> ``[R, Hq, Dv]``.

    ``options`` go to the attention operator (`cache.layer`).
    """
    groups = query_RHD.shape[1] // key_RHD.shape[1]
    own = step.layer(*pool.pair(layer, key_RHD, value_RHD), groups, sliding_window)
    rows = query_RHD, key_RHD, value_RHD
    return attend_layer(own, *rows, sliding_window=sliding_window, **options)
