"""Acceptance tests and residual draws, beside reading the scores twice.

python profiling/ops/rejection.py
"""

from __future__ import annotations

from collections.abc import Iterator

from ceiling import Case, Setup, main, size_of

from eagle4.ops import rejection_rows


def cases(setup: Setup) -> Iterator[Case]:
    vocab, count = (49_152 if setup.is_small else 151_936), 128
    for rows in (1, 17, 136):
        score = setup.randn(rows, vocab).float()
        keys = [setup.integers(1 << 62, rows) for _ in range(2)]
        token = score.topk(count, dim=-1).indices
        logq = setup.randn(rows, count).double().log_softmax(-1)
        tensors = score, *keys, token[:, :4], token, logq

        def run(impl: str, tensors=tensors):
            return rejection_rows(*tensors, impl=impl)

        yield Case(f"rows {rows} vocabulary {vocab}", 2 * size_of(score), run)


if __name__ == "__main__":
    main("rejection", cases)
