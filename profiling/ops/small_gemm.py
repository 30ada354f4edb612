"""Few rows through one linear layer, beside reading its weight once.

python profiling/ops/small_gemm.py
"""

from __future__ import annotations

from collections.abc import Iterator

from ceiling import Case, Setup, main, size_of
from torch import nn

from eagle4.ops import small_linear


def cases(setup: Setup) -> Iterator[Case]:
    shapes = [(576, 576), (576, 1536)] if setup.is_small else [(4096, 4096), (4096, 12_288)]
    for width, columns in shapes:
        linear = nn.Linear(width, columns, bias=False).to(setup.device, setup.dtype)
        for rows in (1, 4, 16, 64):
            states = setup.randn(rows, width)

            def run(impl: str, states=states, linear=linear):
                return small_linear(states, linear, impl)

            yield Case(f"{width} to {columns} rows {rows}", size_of(linear.weight, states), run)


if __name__ == "__main__":
    main("small_gemm", cases)
