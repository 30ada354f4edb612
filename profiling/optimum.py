"""The optimal causal policy of a chain in `profiling.world`, by dynamic programming.

It knows the law of acceptance and every cost. After D levels it has seen the classes of the root
and of D - 1 nodes, and either verifies a prefix or pays for another level:

    V(c_0..c_D-1) = max( max_n  price * (1 + S_1 + .. + S_n) - verify(1 + n),
                         -level + sum_c P(c | c_D-1) V(c_0..c_D-1, c) )

with S_d the product of true acceptances. The price of a token is raised until a round is worth
nothing (Dinkelbach), which is then the optimal nanoseconds per token. Shares no code with the
harness.
"""

from __future__ import annotations

from .world import Costs, Process


def optimal_rate(process: Process, costs: Costs, max_depth: int = 8) -> float:
    """Tokens per second of one sequence, width 1, plain rounds allowed."""
    price = float(costs.verify(1))  # of plain decoding
    for _ in range(30):
        tokens, ns = _best_round(process, costs, price, max_depth)
        if ns / tokens >= price * (1 - 1e-9):
            break
        price = ns / tokens
    return 1e9 / price


def _best_round(
    process: Process, costs: Costs, price: float, max_depth: int
) -> tuple[float, float]:
    """Expected tokens and nanoseconds of a speculative round that is optimal at a price."""
    true, steps = process.true[:, 0], process.next_class

    def best(last: int, survival: float, survivals: tuple[float, ...]) -> tuple[float, float]:
        survival *= float(true[last])
        survivals = (*survivals, survival)
        options = [
            (1 + sum(survivals[:n]), float(costs.verify(1 + n))) for n in range(len(survivals) + 1)
        ]
        if len(survivals) < max_depth:
            below = [best(c, survival, survivals) for c in range(len(true))]
            odds = steps[last]
            options.append(
                (
                    float(sum(p * t for p, (t, _) in zip(odds, below, strict=True))),
                    costs.level(1)
                    + float(sum(p * n for p, (_, n) in zip(odds, below, strict=True))),
                )
            )
        return max(options, key=lambda option: option[0] * price - option[1])

    starts = [best(c, 1.0, ()) for c in range(len(true))]
    tokens = sum(p * t for p, (t, _) in zip(process.root_class, starts, strict=True))
    ns = sum(p * n for p, (_, n) in zip(process.root_class, starts, strict=True))
    return float(tokens), float(ns) + costs.level(2) + costs.fixed_ns
