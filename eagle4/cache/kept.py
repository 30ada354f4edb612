"""K/V pools that stay where they are from one generation to the next.

A recorded launch holds addresses. Pools that every generation makes anew would cost it all its
recordings; here the tensors of a pool that nobody uses any more go to the next one.
"""

from __future__ import annotations

import weakref

import torch

from .pool import KVPool

Layers = dict[int, tuple[torch.Tensor, torch.Tensor]]
MOST = 2  # sets of tensors that are kept for one kind of pool


class KeptPools:
    """Pools of one kind (the target's or the drafter's), one after the other."""

    def __init__(self) -> None:
        self._kept: list[tuple[weakref.ref[KVPool], Layers]] = []

    def pool(self) -> KVPool:
        """An empty pool, on the tensors of an earlier one when that is gone."""
        free = [entry for entry in self._kept if entry[0]() is None]
        layers: Layers = {}
        if free:
            used = max(free, key=lambda entry: len(entry[1]))
            self._kept = [entry for entry in self._kept if entry is not used]
            layers = used[1]
            for pair in layers.values():
                for tensor in pair:
                    tensor.zero_()  # what was never written may be read under a mask
        pool = KVPool(layers)
        self._kept = [*self._kept, (weakref.ref(pool), layers)][-MOST:]
        return pool

    def clear(self) -> None:
        """Keep nothing of what there is."""
        self._kept = []
