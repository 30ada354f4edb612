"""Choosing and ordering the nodes to verify.

python profiling/ops/prune.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ceiling import Case, Setup, main, size_of

from eagle4.ops import prune
from eagle4.types import Tree


def cases(setup: Setup) -> Iterator[Case]:
    for batch in (1, 8, 64):
        for capacity, nodes in ((180, 16), (712, 63)):
            index = torch.arange(capacity, device=setup.device).repeat(batch, 1)
            parent = torch.div(index, 4, rounding_mode="floor") - 1
            depth = (index + 4).log2().floor().long() - 1
            count = torch.full((batch,), capacity, device=setup.device)
            pool = Tree(index, parent, depth, -index.float(), count)
            limit = torch.full((batch,), 12, device=setup.device)

            def run(impl: str, pool=pool, nodes=nodes, limit=limit):
                return prune(pool, nodes, limit, impl)

            moved = size_of(pool.depth_BN, pool.score_BN) + batch * nodes * 7 * 8
            yield Case(f"B{batch} {nodes} of {capacity}", moved, run)


if __name__ == "__main__":
    main("prune", cases)
