"""One level of a growing tree: bookkeeping, so launches count and bytes hardly do.

python profiling/ops/grow_level.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ceiling import Case, Setup, main, size_of

from eagle4.ops import grow_level
from eagle4.types import Candidates, Tree


def cases(setup: Setup) -> Iterator[Case]:
    for batch in (1, 8, 64):
        for top_k in (4, 8):
            capacity = top_k + 11 * top_k * top_k
            columns = [setup.integers(top_k, batch, capacity) for _ in range(3)]
            score = -torch.rand(batch, capacity, device=setup.device)
            pool = Tree(*columns, score, torch.full((batch,), top_k, device=setup.device))
            frontier = setup.integers(top_k, batch, top_k)
            logp = -torch.rand(batch * top_k, top_k, device=setup.device)
            candidates = Candidates(setup.integers(999, batch * top_k, top_k), logp)

            def run(impl: str, pool=pool, frontier=frontier, candidates=candidates, k=top_k):
                return grow_level(pool, frontier, candidates, k, impl)

            written = size_of(*candidates) * 2 + size_of(frontier) * 2
            yield Case(f"B{batch} top_k {top_k}", written, run)


if __name__ == "__main__":
    main("grow_level", cases)
