"""The walk over a verified tree: bookkeeping, so launches count and bytes hardly do.

python profiling/ops/accept_walk.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ceiling import Case, Setup, main, size_of

from eagle4.ops import accept_walk, ancestor_matrix
from eagle4.types import Tree


def cases(setup: Setup) -> Iterator[Case]:
    for batch in (1, 8, 64):
        for nodes in (16, 63):
            index = torch.arange(nodes, device=setup.device).repeat(batch, 1)
            parent = torch.div(index, 2, rounding_mode="floor") - 1
            matrix = ancestor_matrix(parent, "torch")
            count = torch.full((batch,), nodes, device=setup.device)
            token = setup.integers(2, batch, nodes)
            tree = Tree(token, parent, matrix.sum(dim=2), -index.float(), count)
            choice = setup.integers(2, batch, nodes + 1)

            def run(impl: str, tree=tree, matrix=matrix, choice=choice):
                return accept_walk(tree, matrix, choice, impl)

            yield Case(f"B{batch} {nodes} nodes", size_of(*tree[:3], matrix, choice), run)


if __name__ == "__main__":
    main("accept_walk", cases)
