"""Key and value storage: one ``[slots, heads, width]`` pair of tensors per attention layer.

Layers appear on their first write, so head counts and widths (which differ between layers in some
families, and between K and V under MLA) never have to be guessed from a config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ops import has_kernels, move_rows, row_addresses
from ..ops.sizes import power_of_2

if TYPE_CHECKING:
    from .recurrent import RecurrentPool


class KVPool:
    """Slot-addressed K/V of all layers of one model; ``recurrent`` is None without such layers.

    ``layers``: tensors of zeros to go on with. They and those that follow are made with room for a
    power of two of slots, so that they rarely move.
    """

    def __init__(self, layers: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
        self.num_slots = 0
        self.layers = {} if layers is None else layers
        self._is_roomy = layers is not None
        self._addresses: torch.Tensor | None = None  # of all layers, for `move`
        self.recurrent: RecurrentPool | None = None

    def resize(self, num_slots: int) -> None:
        """Grow to ``num_slots``, keeping what is stored."""
        if num_slots <= self.num_slots:
            return
        self.num_slots = num_slots
        for layer, pair in self.layers.items():
            self.layers[layer] = tuple(_grown(t, self._rows) for t in pair)  # type: ignore[assignment]
        self._addresses = None

    @property
    def _rows(self) -> int:
        return power_of_2(self.num_slots) if self._is_roomy else self.num_slots

    def pair(
        self, layer: int, key_RHD: torch.Tensor, value_RHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's whole (K, V), made for rows like these when it does not exist yet."""
        pair = self.layers.get(layer)
        if pair is None:
            pair = (self._empty(key_RHD), self._empty(value_RHD))
            self.layers[layer] = pair
            self._addresses = None
        return pair

    def _empty(self, like_RHD: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: a slot that was never written may be read under a False mask, and
        # 0 * NaN is NaN.
        with torch.inference_mode(torch.is_inference_mode_enabled() and not self._is_roomy):
            return like_RHD.new_zeros((self._rows, *like_RHD.shape[1:]))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots in every layer; overlapping ranges are safe (all reads come first)."""
        pools = [tensor for pair in self.layers.values() for tensor in pair]
        if self._addresses is None and pools and has_kernels(pools[0].device):
            self._addresses = row_addresses(pools)
        move_rows(pools, source, target, self._addresses)

    @property
    def num_bytes(self) -> int:
        kv_bytes = sum(t.numel() * t.element_size() for pair in self.layers.values() for t in pair)
        return kv_bytes + (0 if self.recurrent is None else self.recurrent.num_bytes)


def _grown(tensor: torch.Tensor, num_slots: int) -> torch.Tensor:
    if tensor.shape[0] >= num_slots:
        return tensor
    with torch.inference_mode(tensor.is_inference()):
        bigger = tensor.new_zeros((num_slots, *tensor.shape[1:]))
    bigger[: tensor.shape[0]] = tensor
    return bigger
