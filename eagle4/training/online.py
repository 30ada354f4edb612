"""Features computed when they are asked for: what `features.FeatureStore` reads from disk.

A token's features take ``2 (T + 1) H`` bytes, which for a large target and much text is more disk
than there is. Here a sequence costs one forward pass of the target every time it is drawn instead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .extract import check_head, extract
from .features import FeatureSequence, FeatureStore
from .sequences import training_sequences


class OnlineFeatures(FeatureStore):
    """The sequences of a response file as a feature store that runs the target.

    ``identity``: of the target, as `features.target_identity` gives it. Values are those that a
    store made by the same target in the same dtype holds. Raises `ValueError` for a file without
    usable sequences and for targets that change their logits after the head.
    """

    def __init__(self, responses: str | os.PathLike, identity: dict[str, Any], target: Any):
        self.folder, self.target = Path(responses).parent, target
        self._rows = [
            (ids.int(), mask.bool(), info) for ids, mask, info in training_sequences(responses)
        ]
        if not self._rows:
            raise ValueError(f"{responses} holds no sequences to learn from")
        check_head(target, self._rows[0][0])
        self.manifest = {
            "target": identity,
            "num_sequences": len(self._rows),
            "num_tokens": sum(len(ids) for ids, _, _ in self._rows),
            "num_supervised": sum(int(mask.sum()) for _, mask, _ in self._rows),
        }

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> FeatureSequence:
        ids, mask, _ = self._rows[index]
        with torch.autocast(self.target.device.type, enabled=False):
            taps, last = extract(self.target, self.manifest["target"]["tap_layers"], ids)
        return FeatureSequence(ids, taps, last, mask)

    def field(self, index: int, name: str) -> torch.Tensor:
        ids, mask, _ = self._rows[index]
        known = {"ids": ids, "mask": mask}
        return known[name] if name in known else getattr(self[index], name)

    def info(self, index: int) -> dict[str, Any]:
        return self._rows[index][2]
