"""A toy language with a toy drafter whose sampled output law is computed exactly.

Every random decision of a program goes through an `Oracle`; `explore` runs the program once per
sequence of outcomes and yields what came out with its probability. So the law of real code is
summed, not estimated: the walk over the tree, the choice at every row, the acceptance test, the
verdict. Only the draws themselves are the oracle's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LogitsProcessorList

from eagle4.engine.sampler import Sampler
from eagle4.engine.state import Sequence
from eagle4.ops import coupled, rejection
from eagle4.sampling import context_free, draft_law, process_path
from eagle4.tree import Template, ancestor_matrix, keep_slots
from eagle4.types import Candidates, Drawn, Law, Tree
from eagle4.verify import verify_greedy

History = tuple[int, ...]


class Oracle:
    """Answers decisions with a given prefix of outcomes, then with the first possible one."""

    def __init__(self, prefix: list[int]):
        self.outcomes = list(prefix)
        self.options: list[list[float]] = []
        self.probability = 1.0

    def decide(self, probabilities: list[float]) -> int:
        step = len(self.options)
        self.options.append(probabilities)
        if step == len(self.outcomes):
            self.outcomes.append(_next_possible(probabilities, 0))
        self.probability *= probabilities[self.outcomes[step]]
        return self.outcomes[step]


def _next_possible(probabilities: list[float], first: int) -> int:
    return next((i for i in range(first, len(probabilities)) if probabilities[i] > 0), -1)


def explore(program: Callable[[Oracle], Any]) -> Iterator[tuple[Any, float]]:
    """``(result, probability)`` of every way in which the decisions can fall."""
    prefix: list[int] | None = []
    while prefix is not None:
        oracle = Oracle(prefix)
        yield program(oracle), oracle.probability
        prefix = None
        for step in reversed(range(len(oracle.options))):
            other = _next_possible(oracle.options[step], oracle.outcomes[step] + 1)
            if other >= 0:
                prefix = [*oracle.outcomes[:step], other]
                break


class _Coin:
    """A uniform number that is only ever compared."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle

    def __lt__(self, accept: torch.Tensor) -> bool:
        chance = min(max(float(accept), 0.0), 1.0)
        return self.oracle.decide([chance, 1.0 - chance]) == 0


class Language:
    """Random next-token scores of a target and a drafter for every history."""

    def __init__(self, vocab: int, seed: int, spread: float = 1.2):
        self.vocab, self.seed, self.spread = vocab, seed, spread

    def target(self, history: History) -> torch.Tensor:
        return self.spread * torch.randn(self.vocab, generator=self._source(history, 1))

    def drafter(self, history: History) -> Candidates:
        """All tokens but one, best first, as a drafter with candidates proposes them."""
        noise = torch.randn(self.vocab, generator=self._source(history, 2))
        logp = (self.target(history) + noise).log_softmax(0)
        found = logp.topk(self.vocab - 1)
        return Candidates(found.indices.unsqueeze(0), found.values.unsqueeze(0))

    def _source(self, history: History, kind: int) -> torch.Generator:
        value = self.seed * 7 + kind
        for token in history:
            value = (value * 31 + token + 1) % (1 << 40)
        return torch.Generator().manual_seed(value)


def target_law(
    language: Language, processors: LogitsProcessorList, prompt: History, horizon: int
) -> dict[History, float]:
    """The law of the next ``horizon`` tokens as Transformers defines it, float64."""
    laws = {(): 1.0}
    for _ in range(horizon):
        longer: dict[History, float] = {}
        for tokens, chance in laws.items():
            history = prompt + tokens
            scores = processors(torch.tensor([history]), language.target(history)[None].float())
            for token, p in enumerate(scores[0].double().softmax(0).tolist()):
                if p > 0:
                    longer[(*tokens, token)] = chance * p
        laws = longer
    return laws


class Rounds:
    """Decoding by rounds with rejection sampling; ``broken`` names a fault to show that it shows.

    ``shapes``: the template of a round by the number of tokens that the round before committed.
    """

    def __init__(
        self,
        language: Language,
        processors: LogitsProcessorList,
        shapes: Callable[[int], Template],
        broken: str | None = None,
    ):
        self.language, self.processors, self.shapes = language, processors, shapes
        self.broken = broken
        self.warpers = context_free(processors)
        self._memo: dict[tuple[History, int], dict[History, float]] = {}

    def law(self, prompt: History, horizon: int) -> dict[History, float]:
        """The law of the first ``horizon`` tokens behind the prompt."""
        return self._continue(prompt, (), horizon, 1)

    def _continue(self, prompt: History, done: History, left: int, last: int):
        if left <= 0:
            return {(): 1.0}
        total: dict[History, float] = {}
        for tokens, chance in self._round(prompt + done, last).items():
            tail = self._continue(prompt, done + tokens, left - len(tokens), len(tokens))
            for more, probability in tail.items():
                key = (tokens + more)[:left]
                total[key] = total.get(key, 0.0) + chance * probability
        return total

    def _round(self, history: History, last: int) -> dict[History, float]:
        if (history, last) not in self._memo:
            law: dict[History, float] = {}
            for tokens, chance in explore(lambda oracle: self._play(history, last, oracle)):
                law[tokens] = law.get(tokens, 0.0) + chance
            self._memo[history, last] = law
        return self._memo[history, last]

    def _play(self, history: History, last: int, oracle: Oracle) -> History:
        drawn = self._draw(history, self.shapes(last), oracle)
        tree = drawn.tree
        count = int(tree.count_B[0])
        paths = [history]
        for node in range(count):
            paths.append(paths[int(tree.parent_BN[0, node]) + 1] + (int(tree.token_BN[0, node]),))
        logits = torch.stack([self.language.target(path) for path in paths])
        sampler = Sampler([0], self.warpers)
        choose = sampler.choose(Sequence(0, 0, len(history)), drawn, 0)
        token_N, parent_N = tree.token_BN[0, :count], tree.parent_BN[0, :count]
        with drawn_by(oracle):
            _, choice_R = process_path(
                self.processors, logits, torch.tensor(history), token_N, parent_N, choose
            )
        choice_BR = torch.full((1, tree.token_BN.shape[1] + 1), -1)
        choice_BR[0, : count + 1] = choice_R
        verdict = verify_greedy(tree, ancestor_matrix(tree.parent_BN), choice_BR)
        path = verdict.path_BS[0, : int(verdict.length_B[0])]
        return (*tree.token_BN[0, path].tolist(), int(verdict.bonus_B[0]))

    def _draw(self, history: History, shape: Template, oracle: Oracle) -> Drawn:
        """The real template filled by the oracle, without replacement."""
        nodes, width = len(shape.parent), self.language.vocab - 1
        tokens = torch.zeros(1, nodes, dtype=torch.int64)
        alive = torch.zeros(1, nodes, dtype=torch.bool)
        law = Law(
            torch.zeros(1, nodes + 1, width, dtype=torch.int64),
            torch.full((1, nodes + 1, width), float("-inf"), dtype=torch.float64),
        )
        for row in range(-1, nodes):
            children = [slot for slot in range(nodes) if shape.parent[slot] == row]
            if not children or (row >= 0 and not alive[0, row]):
                continue
            path, slot = (), row
            while slot >= 0:
                path, slot = (int(tokens[0, slot]), *path), shape.parent[slot]
            drawn, stated = self._laws(history + path)
            law.token_BRC[:, row + 1] = drawn.token_RK
            law.logp_BRC[:, row + 1] = stated.logp_RK
            found = self._siblings(drawn, len(children), oracle)
            for slot, token in zip(children, found, strict=False):
                tokens[0, slot], alive[0, slot] = token, True
        if self.broken == "stopping on a drawn token":
            alive[0] &= tokens[0] != 1
            for slot, parent in enumerate(shape.parent):
                alive[0, slot] &= parent < 0 or bool(alive[0, parent])
        depth = torch.tensor([shape.depth])
        parent = torch.tensor([shape.parent])
        score = torch.zeros(1, nodes)
        tree = Tree(tokens, parent, depth, score, torch.tensor([nodes]))
        return keep_slots(Drawn(tree, law), alive)

    def _laws(self, history: History) -> tuple[Candidates, Candidates]:
        """The law that is drawn from and the law that verification is told."""
        raw = self.language.drafter(history)
        plain = raw._replace(logp_RK=raw.logp_RK.double().log_softmax(-1))
        warped = draft_law(self.warpers, raw)
        if self.broken == "raw q":
            return warped, plain
        if self.broken == "q before warping":
            return plain, warped
        return warped, warped

    def _siblings(self, law: Candidates, count: int, oracle: Oracle) -> list[int]:
        logq, tokens = law.logp_RK[0].clone(), law.token_RK[0].tolist()
        if self.broken == "greedy drafts with q ratios":
            return [tokens[i] for i in logq.argsort(descending=True)[:count].tolist()]
        found = []
        for _ in range(count):
            if not torch.isfinite(logq).any():
                break
            index = oracle.decide(logq.softmax(0).tolist())
            found.append(tokens[index])
            logq[index] = float("-inf")
        return found[::-1] if self.broken == "siblings out of order" else found


class drawn_by:
    """While it lasts, uniform numbers and final draws of verification are the oracle's."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle

    def __enter__(self) -> None:
        self.saved = rejection.uniform, rejection.draw, coupled.draw
        oracle = self.oracle
        rejection.uniform = lambda key, index: [_Coin(oracle) for _ in index]  # type: ignore
        rejection.draw = coupled.draw = self._draw  # type: ignore[assignment]

    def _draw(self, score_S: torch.Tensor, token_S: torch.Tensor, key: int) -> torch.Tensor:
        return token_S[self.oracle.decide(score_S.double().softmax(0).tolist())]

    def __exit__(self, *args: object) -> None:
        rejection.uniform, rejection.draw, coupled.draw = self.saved
