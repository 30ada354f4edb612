"""Ancestor sets as words.

python profiling/ops/ancestors.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ceiling import Case, Setup, main, size_of

from eagle4.ops import ancestor_words


def cases(setup: Setup) -> Iterator[Case]:
    for batch in (1, 8, 64):
        for nodes in (16, 64):
            index = torch.arange(nodes, device=setup.device).repeat(batch, 1)
            parent = torch.div(index, 2, rounding_mode="floor") - 1

            def run(impl: str, parent=parent):
                return ancestor_words(parent, impl)

            yield Case(f"B{batch} {nodes} nodes", 2 * size_of(parent), run)


if __name__ == "__main__":
    main("ancestors", cases)
