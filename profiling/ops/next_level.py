"""The harness's decisions: sorting and pricing a batch's nodes.

python profiling/ops/next_level.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ceiling import Case, Setup, main, size_of

from eagle4.ops import best_offer, choose_nodes


def cases(setup: Setup) -> Iterator[Case]:
    device = setup.device
    for batch in (1, 8, 64):
        drafted = setup.integers(1 << 30, 1, batch * 16)
        children = setup.integers(1 << 28, 1, batch, 4, 4)
        path = setup.integers(1 << 26, 1, batch, 3)
        token = torch.full((1,), 1_000_000, device=device)
        verify = torch.arange(batch * 64 + 1, device=device).unsqueeze(0) * 1000
        offers = torch.arange(6, device=device).unsqueeze(0) * 10_000
        prices = token, verify, offers

        def offer(impl: str, tensors=(drafted, children, path, *prices)):
            return best_offer(*tensors, 1, (2, 4), impl)

        yield Case(f"best offer B{batch}", size_of(drafted, children, path, verify), offer)
        pool = setup.integers(1 << 30, 1, batch, 64)

        def choose(impl: str, tensors=(pool, token, verify)):
            return choose_nodes(*tensors, 16, impl)

        yield Case(f"choose nodes B{batch}", size_of(pool, verify), choose)


if __name__ == "__main__":
    main("next_level", cases)
