"""Candidates and their exact logits: rank 128 and 512, beside reading the factors once.

python profiling/ops/candidate_head.py
"""

from __future__ import annotations

from collections.abc import Iterator

from ceiling import Case, Setup, main, size_of
from torch import nn

from eagle4.ops import best_candidates, candidate_logprobs


def linear(setup: Setup, rows: int, columns: int) -> nn.Linear:
    found = nn.Linear(columns, rows, bias=False, device="meta")
    found.weight = nn.Parameter(setup.randn(rows, columns), requires_grad=False)
    return found


def cases(setup: Setup) -> Iterator[Case]:
    vocab, hidden = (49_152, 576) if setup.is_small else (151_936, 4096)
    head, count = linear(setup, vocab, hidden), 128
    for rank in (128, 512):
        up = linear(setup, vocab, rank)
        for rows in (1, 4, 32):
            low, states = setup.randn(rows, rank), setup.randn(rows, hidden)
            token = best_candidates(low, up, count, "torch")

            def choose(impl: str, low=low, up=up):
                return best_candidates(low, up, count, impl)

            def score(impl: str, states=states, token=token):
                return candidate_logprobs(head, states, token, impl)

            yield Case(f"best {count} rank {rank} rows {rows}", size_of(up.weight, low), choose)
            if rank == 128:
                read = rows * count * size_of(head.weight[0])
                yield Case(f"exact logits rows {rows}", read + size_of(states), score)


if __name__ == "__main__":
    main("candidate_head", cases)
