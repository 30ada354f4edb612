"""Steps that read keys as one tensor per forward: a view of the pool, or a gather.

One visibility matrix says what a row sees; all layers share it and the masks made from it.
"""

from __future__ import annotations

import torch

from ..ops import fold_visible, tree_attention
from .pages import PageTable
from .rows import AttentionStep, Window


class DenseStep(AttentionStep):
    """``read`` gives a pool tensor as ``[B, L, heads, width]``, `visible` what rows see of it.

    M pads every sequence to the same number of rows, L to the same number of keys.
    """

    def __init__(self, table: PageTable, windows: list[Window], device: torch.device):
        super().__init__(table, windows, device)
        longest = max(window.prefix + window.visible.shape[1] for window in windows)
        self.visible_BML, self.key_position_BL = _visibility(windows, longest, device)
        self.query_position_BM = self.pad(self.position_R)
        self.run = _uniform_run(table, windows, longest)
        is_run = self.run is not None
        self.slot_BL = None if is_run else _gather_slots(table, windows, longest, device)
        self._windowed: dict[int, torch.Tensor] = {}
        self._folded: dict[tuple, torch.Tensor] = {}

    @property
    def shape(self) -> torch.Size:
        """(B, M, L)."""
        return self.visible_BML.shape

    def read(self, pool_SHD: torch.Tensor) -> torch.Tensor:
        """Keys or values of every sequence as ``[B, L, heads, width]``; a view when possible."""
        batch, _, length = self.shape
        if self.slot_BL is not None:
            return pool_SHD[self.slot_BL]
        assert self.run is not None
        start, stride = self.run
        if batch == 1:
            return pool_SHD[start : start + length].unsqueeze(0)
        return pool_SHD[start : start + batch * stride].unflatten(0, (batch, stride))[:, :length]

    def visible(self, sliding_window: int | None) -> torch.Tensor:
        """Visibility ``[B, M, L]``; a window W lets position p see positions in ``(p - W, p]``."""
        if sliding_window is None:
            return self.visible_BML
        if sliding_window not in self._windowed:
            distance = self.query_position_BM.unsqueeze(-1) - self.key_position_BL.unsqueeze(1)
            self._windowed[sliding_window] = self.visible_BML & (distance < sliding_window)
        return self._windowed[sliding_window]

    def mask(self, sliding_window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """The visibility as `ops.tree_attention` adds it, made once for all layers alike."""
        key = sliding_window, groups, dtype
        if key not in self._folded:
            self._folded[key] = fold_visible(self.visible(sliding_window), groups, dtype)
        return self._folded[key]

    def attend(
        self,
        query_RHD: torch.Tensor,
        keys_SHD: torch.Tensor,
        values_SHD: torch.Tensor,
        sliding_window: int | None,
        **options,
    ) -> torch.Tensor:
        """As `AttentionStep.attend`; ``options`` go to `ops.tree_attention`."""
        groups = query_RHD.shape[1] // keys_SHD.shape[1]
        mask = self.mask(sliding_window, groups, query_RHD.dtype)
        keys, values = self.read(keys_SHD), self.read(values_SHD)
        return self.unpad(tree_attention(self.pad(query_RHD), keys, values, mask, **options))


def _visibility(
    windows: list[Window], longest: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    most = max(window.visible.shape[0] for window in windows)
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


def _uniform_run(table: PageTable, windows: list[Window], longest: int) -> tuple[int, int] | None:
    """(start, stride) when all sequences are contiguous and equally spaced, in order."""
    starts = [table.run_start(window.sequence) for window in windows]
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


def _gather_slots(
    table: PageTable, windows: list[Window], longest: int, device: torch.device
) -> torch.Tensor:
    rows = []
    for window in windows:
        width = window.prefix + window.visible.shape[1]
        slots = table.slots(window.sequence, 0, width)
        rows.append(slots + [slots[0]] * (longest - width))
    return torch.tensor(rows, device=device)
