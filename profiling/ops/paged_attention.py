"""Tree attention over paged keys: 17 rows of one to eight sequences over growing contexts.

python profiling/ops/paged_attention.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ceiling import Case, Setup, main, size_of

from eagle4.ops import PagedView, ancestor_matrix, pack_bits, paged_attention

PAGE = 64


def make(setup: Setup, batch: int, context: int, rows: int, heads: int, kv_heads: int, width: int):
    pages = -(-(context + rows) // PAGE)
    table = torch.randperm(batch * pages, device=setup.device).view(batch, pages)
    parent = torch.arange(rows, device=setup.device).div(2, rounding_mode="floor") - 1
    matrix = ancestor_matrix(parent.repeat(batch, 1))
    depth = matrix.sum(dim=2) - 1 + context
    prefix = torch.full((batch,), context, device=setup.device)
    view = PagedView(table, prefix, pack_bits(matrix), depth, depth)
    query = setup.randn(batch, rows, heads, width)
    key, value = (setup.randn(batch * pages * PAGE, kv_heads, width) for _ in range(2))
    num_bytes = size_of(query) * 2 + batch * (context + rows) * 2 * size_of(key[0])
    return query, key, value, view, num_bytes


def cases(setup: Setup) -> Iterator[Case]:
    contexts = (256, 2048) if setup.is_small else (2048, 32_768, 131_072)
    shapes = [(9, 3, 64)] if setup.is_small else [(32, 8, 128), (64, 8, 64)]
    for heads, kv_heads, width in shapes:
        for context in contexts:
            for batch, window in ((1, None), (8, None), (1, 1024)):
                if batch * context > 1 << 18:
                    continue
                *tensors, num_bytes = make(setup, batch, context, 17, heads, kv_heads, width)
                if window is not None:
                    num_bytes = num_bytes * min(window, context) // context

                def run(impl: str, tensors=tensors, window=window):
                    return paged_attention(*tensors, PAGE, sliding_window=window, impl=impl)

                name = f"B{batch} context {context} heads {heads}/{kv_heads}x{width}"
                yield Case(name + (f" window {window}" if window else ""), num_bytes, run)


if __name__ == "__main__":
    main("paged_attention", cases)
