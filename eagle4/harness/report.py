"""What the harness did and why: counters for `out.speculation.harness`, one round in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..types import Load
from .fixed_point import ONE
from .nodes import Nodes
from .policy import Decision


@dataclass
class Round:
    """One round: decided, predicted, measured."""

    speculative: bool = False
    load: Load = Load(1)
    plain_ns: int = 1
    is_probe: bool = False
    is_hopeless: bool = False
    is_check: bool = False  # plain, to compare
    token_ns: int = 0
    depth: int = 0
    rows: int = 0
    tokens: int = 0
    promised_q30: int = 0
    cost_ns: int = 0  # predicted
    measured_ns: int = 0
    decisions: list[tuple[int, Decision]] = field(default_factory=list)


class HarnessReport:
    """Sums over the rounds of a call, and the last speculative round in detail."""

    def __init__(self):
        self.rounds: Counter[str] = Counter()
        self.depths: Counter[int] = Counter()  # levels drafted -> rounds
        self.verified: Counter[int] = Counter()  # nodes verified -> rounds
        self.ns: Counter[str] = Counter()
        self.promised = 0.0
        self.accepted = 0
        self.token_ns = 0
        self.last: tuple[Round, Nodes, list[list[int]], list[list[int]]] | None = None

    def add(
        self, done: Round, nodes: Nodes, chosen: list[list[int]], tokens: list[list[int]]
    ) -> None:
        """Count one round."""
        kind = "speculative" if done.speculative else "plain"
        self.rounds[kind] += 1
        self.rounds["probe"] += done.is_probe and done.speculative
        self.rounds["check"] += done.is_check
        self.rounds["hopeless"] += done.is_hopeless
        self.ns[f"{kind}_predicted"] += done.cost_ns
        self.ns[f"{kind}_measured"] += done.measured_ns
        if done.speculative:
            self.depths[done.depth] += 1
            self.verified[done.rows - done.load.num_sequences] += 1
            self.promised += done.promised_q30 / ONE
            self.accepted += done.tokens - done.load.num_sequences
            self.token_ns = done.token_ns
            self.last = (done, nodes, chosen, tokens)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        rate = 1e9 / self.token_ns if self.token_ns else None
        return {
            "rounds": dict(self.rounds),
            "levels_drafted": dict(sorted(self.depths.items())),
            "nodes_verified": dict(sorted(self.verified.items())),
            "accepted_predicted": round(self.promised, 2),
            "accepted": self.accepted,
            "ms": {name: round(ns / 1e6, 2) for name, ns in self.ns.items()},
            "tokens_per_s_expected": None if rate is None else round(rate, 2),
        }

    def explain(self, decode: Callable[[list[int]], str]) -> str:
        """The last speculative round: its tree with survivals, and every decision in words."""
        if self.last is None:
            return "no round speculated"
        done, nodes, chosen, tokens = self.last
        lines = [
            f"A token is worth {_ms(done.token_ns)}; a plain round takes {_ms(done.plain_ns)}.",
            *(_decision_line(depth, decision) for depth, decision in done.decisions),
            f"Verified {done.rows - done.load.num_sequences} nodes: "
            f"{done.promised_q30 / ONE:.2f} accepted expected, {done.tokens} tokens committed; "
            f"{_ms(done.cost_ns)} predicted, {_ms(done.measured_ns)} measured.",
        ]
        for b, picked in enumerate(chosen[: len(nodes.parent)]):
            lines.append(f"sequence {b}:" if len(chosen) > 1 else "root")
            lines += _tree_lines(nodes, b, set(picked), tokens[b], decode)
        return "\n".join(lines)


def _tree_lines(
    nodes: Nodes, b: int, picked: set[int], tokens: Sequence[int], decode: Callable
) -> list[str]:
    lines = []

    def walk(parent: int) -> None:
        first = nodes.first_child[b].get(parent)
        if first is None:
            return
        for child in range(first, first + nodes.top_k):
            mark = "+" if child in picked else "-"
            text = decode([tokens[child]])
            lines.append(
                f"{'  ' * nodes.depth_of[child]}{mark} {text!r}  draft probability "
                f"{nodes.prob[b][child] / ONE:.2f}, survival {nodes.survival[b][child] / ONE:.2f}"
            )
            walk(child)

    walk(-1)
    return lines


def _decision_line(depth: int, decision: Decision) -> str:
    if decision.go:
        return f"After level {depth}: another level, {decision.width} wide, is worth " + (
            f"{_ms(decision.gain_ns)} more than it costs."
        )
    return f"After level {depth}: stop, no further level is worth its cost."


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"
