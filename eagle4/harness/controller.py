"""`HarnessPolicy`: the state around the policy. It remembers, prices, asks `policy` and learns.

One object serves one `generate` call; what it learns lives in the `CostTable` and the `Experience`,
which outlast it. Nothing here reads a clock: the engine reports what it measured, and decisions use
predicted costs only, so a frozen table gives the same decisions every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config import SpeculativeConfig
from ..types import Load, Plan
from . import outlook
from .acceptance import Book, Experience
from .cost import CostTable
from .fixed_point import MOST_NS
from .nodes import DraftRecord, Nodes
from .outlook import Outlook, Outlooks, Shape
from .policy import Prices
from .regime import MOST_REST, UNIT, Q, Regime
from .report import HarnessReport, Round
from .trust import Trust
from .usual import Usual
from .wide import WideNodes

BOOK_ROUNDS = 8  # rounds between two looks at what was learned
SETTLE_ROUNDS = 64
WIDE = 16  # sequences from which decisions are made in tensor code
_PLAIN = Plan(False, 0, 0, 0)


class HarnessPolicy:
    """Speculates exactly as far as it pays."""

    def __init__(
        self, config: SpeculativeConfig, table: CostTable, experience: Experience | None = None
    ):
        self.config = config
        self.table = table
        self.experience = experience or Experience()
        self.report = HarnessReport()
        self.book: Book = self.experience.book(config.request_class)
        self._is_book_old = False
        self._regimes: dict[int, Regime] = {}
        self._outlooks = Outlooks(config, table)
        self._trust = Trust()
        self._rounds = self._rest = 0  # rest: plain rounds ahead that are not thought about
        self._plain_ns: list[int] = []  # of the plain rounds since the last thought
        self._nodes: Nodes | WideNodes = Nodes([], self.book)
        self._load, self._round = Load(1), Round()
        self._prices: Prices | None = None
        self._tokens: list[list[int]] = []
        self._chosen: list[list[int]] = []
        self._num_verified: int | None = None  # nodes of the round; None before they are known

    def plan(self, load: Load) -> Plan:
        """Plain or speculative; the limits within which the round's decisions are made."""
        if self._rest and load.num_sequences == self._load.num_sequences:
            self._rest -= 1
            return _PLAIN
        self._wake()
        self._load, self._prices, self._chosen, self._tokens = load, None, [], []
        self._nodes, self._num_verified = Nodes([], self.book), None
        plain_ns = self.table.cost_ns("plain", load.num_sequences, load.context)
        known, hoped = self._outlooks.of(load, self.book, self._rounds // SETTLE_ROUNDS)
        setting = (self._catch_up_ns(load) << Q) // plain_ns, known.rounds_left(load)
        regime = self._regime(load, known, *setting)
        is_hopeless = hoped.gain <= 0
        speculative = not is_hopeless and regime.decide(*setting)
        compared = self.table.num_compared(load.num_sequences)
        is_check = speculative and not self.table.frozen and regime.is_check_due(compared)
        speculative = speculative and not is_check
        self._round = Round(speculative, load, plain_ns, regime.probing, is_hopeless, is_check)
        if speculative:
            return Plan(True, self.config.max_depth, self.config.width, self.config.max_nodes)
        self._rest = MOST_REST if is_hopeless else regime.rest(*setting)
        return _PLAIN

    def _wake(self) -> None:
        """The load changed while the policy rested, or the call ends: the rest is taken back."""
        if self._rest and not self._round.is_hopeless:
            self._regimes[self._load.size].waited -= self._rest
        self._rest = 0
        if self._plain_ns:
            self._learn_plain()

    @property
    def is_plain(self) -> bool:
        """The last round was planned without a draft."""
        return not self._round.speculative

    def begin_draft(self, limits: Sequence[int], probs: Sequence[Sequence[int]]) -> None:
        """The root's children, ``[B][top_k]`` probabilities in 2^-30."""
        self._nodes = (WideNodes if len(limits) > WIDE else Nodes)(limits, self.book)
        self._prices = self.price(len(probs[0]))
        self.add_level([[-1]] * len(limits), probs)

    def add_level(self, frontier: Sequence[Sequence[int]], probs: Sequence[Sequence[int]]) -> None:
        """The children of the ``[B][w]`` expanded nodes, ``[B][w * top_k]`` side by side."""
        self._nodes.add_level(frontier, probs)
        self._nodes.forecast_into(self.experience)
        self._round.depth = self._nodes.depth

    def next_width(self, frontier: Sequence[Sequence[int]], plan: Plan) -> int:
        """How many of the ``[B][K]`` frontier nodes the next level expands; 0 ends drafting."""
        nodes, depth = self._nodes, self._nodes.depth
        limit = min(max(nodes.limits), self.config.max_depth)
        assert self._prices is not None, "begin_draft comes first"
        decision = nodes.next_level(frontier, limit, self.config.mode == "tree", self._prices)
        self._round.decisions.append((depth, decision))
        return decision.width if decision.go else 0

    def choose(self, tokens: list[list[int]], plan: Plan) -> list[list[int]]:
        """Which pool nodes every sequence verifies, ascending. ``tokens``: ids of all nodes."""
        assert self._prices is not None, "begin_draft comes first"
        self._tokens = tokens
        self._chosen = self._nodes.choose(self._prices)
        self._round.promised_q30 = self._nodes.promised(self._chosen)
        self._num_verified = sum(map(len, self._chosen))
        return self._chosen

    def drafted(self, draft: DraftRecord, prices: Prices) -> None:
        """A tree was drafted and chosen on the device, by `device_policy` at these ``prices``."""
        self._prices, self._tokens, self._chosen = prices, draft.tokens, draft.chosen
        self._nodes = nodes = Nodes(draft.limits, self.book)
        for parents, probs in draft.levels:
            nodes.add_level(parents, probs)
            nodes.forecast_into(self.experience)
        done = self._round
        done.depth, done.promised_q30 = nodes.depth, draft.promised_q30
        done.decisions += enumerate(draft.decisions, start=1)
        self._num_verified = draft.num_chosen

    def shape_of_draws(self, acceptance: Sequence[Sequence[float]]) -> tuple[int, int]:
        """Depth and nodes per sequence of a tree that is going to be drawn.

        Nothing of it may depend on the draws, so there is one decision, from what earlier rounds
        say: ``acceptance[d][r]``, the chance that the r-th draw is accepted at depth d + 1.
        """
        config, load = self.config, self._load
        depth = min(config.max_depth, len(acceptance))
        shape = Shape(load.num_sequences, load.context, depth, config.width, config.max_nodes)
        best = outlook.of_draws(self.table, acceptance, shape)
        return best.depth, best.nodes

    def drew(self, depth: int, num_nodes: int) -> None:
        """A tree was drawn that deep; the target verifies ``num_nodes`` nodes of the batch."""
        self._round.depth, self._num_verified = depth, num_nodes
        self._round.token_ns = self._regimes[self._load.size].token_ns(
            self._round.plain_ns // self._load.num_sequences
        )

    def timed(self, kind: str, rows: int, ns: int) -> None:
        """One part of the draft took ``ns``."""
        self._round.cost_ns += self.table.cost_ns(kind, rows, self._load.context)
        self._round.measured_ns += ns
        self.table.refine(kind, rows, self._load.context, ns)

    def observe(self, tokens: Sequence[Sequence[int]], stage_ns: Mapping[str, int]) -> None:
        """Learn from the tokens of a speculative round and from what verification took."""
        done, batch, context = self._round, self._load.num_sequences, self._load.context
        target_ns = stage_ns.get("verify", 0) + stage_ns.get("commit", 0)
        done.tokens = sum(map(len, tokens))
        if done.speculative and self._num_verified is not None:
            done.measured_ns += target_ns
            done.rows = batch + self._num_verified
            done.cost_ns += self.table.verify_curve(batch, self._num_verified, context)[-1]
            self.table.refine_verify(batch, self._num_verified, context, target_ns)
            self._learn(tokens)
            self._count_round()
        else:
            self._plain_ns.append(target_ns)
            if not self._rest:
                self._learn_plain()

    def _learn_plain(self) -> None:
        """Plain rounds in a row are over."""
        done, load = self._round, self._load
        learn = self.table.refine_plain if not done.is_check else self.table.compare_plain
        done.cost_ns = done.plain_ns
        for done.measured_ns in self._plain_ns:
            learn(load.num_sequences, load.context, done.measured_ns)
            self._count_round()
        self._plain_ns = []

    def _count_round(self) -> None:
        self.report.add(self._round, self._nodes.for_report(), self._chosen, self._tokens)
        self._rounds += 1
        if self._rounds % SETTLE_ROUNDS == 0:
            self.table.settle()
        if self._rounds % BOOK_ROUNDS == 0 or self._rounds == 2:
            self.experience.fade(BOOK_ROUNDS)
            if self._is_book_old:
                self._is_book_old = False
                self.book = self.experience.book(self.config.request_class)

    def _learn(self, tokens: Sequence[Sequence[int]]) -> None:
        """Acceptance from a speculative round's nodes, where it had any, and its gain."""
        done, nodes, load, fits = self._round, self._nodes, self._load, []
        if self._prices is not None:
            for b, (own, committed) in enumerate(zip(self._tokens, tokens, strict=False)):
                nodes.learn(b, own, committed, self.experience, self.config.request_class)
            self._trust.learn(done.tokens - len(tokens), done.promised_q30)
            fits = nodes.for_report().fits(self._chosen, self._tokens, tokens)
            self._is_book_old = True
        # Catching up after plain rounds is priced by the probe.
        cost_ns = max(1, done.cost_ns - self._catch_up_ns(load))
        gain_ns = done.tokens * done.plain_ns // load.num_sequences - cost_ns
        gain = (gain_ns << Q) // done.plain_ns
        self._regimes[load.size].record(gain, done.tokens, cost_ns, fits)

    def finish(self) -> None:
        """The call is over: what was typical of it becomes experience."""
        self._wake()
        for size, regime in self._regimes.items():
            usual = self.experience.usual.get(size, Usual(regime.promised / UNIT))
            self.experience.usual[size] = usual.after(regime)

    def price(self, top_k: int) -> Prices:
        """What this round's decisions cost, for levels of up to ``top_k`` nodes."""
        load, cost, regime = self._load, self.table.cost_ns, self._regimes[self._load.size]
        batch, context = load.num_sequences, load.context
        token_ns = regime.token_ns(self._round.plain_ns // batch)
        if not regime.probing:  # which believes the calibration, to verify a node at all
            token_ns = self._trust.scale(token_ns)
        self._round.token_ns = min(token_ns, MOST_NS)
        return Prices(
            self._round.token_ns,
            self.table.verify_curve(batch, batch * self.config.max_nodes, context),
            [cost("level", batch * max(w, 1), context) for w in range(top_k + 1)],
            self.config.max_nodes,
        )

    def _catch_up_ns(self, load: Load) -> int:
        """What rows that wait for the drafter add to those of a usual round."""
        usual, rows = 2 * load.num_sequences, max(load.pending, 1)
        cost = self.table.cost_ns
        return max(0, cost("root", rows, load.context) - cost("root", usual, load.context))

    def _regime(self, load: Load, known: Outlook, catch_up: int, rounds_left: int) -> Regime:
        size = load.size
        if size not in self._regimes:
            usual = self.experience.usual.get(size, Usual(known.gain / UNIT))
            self._regimes[size] = Regime.start(
                *(load.num_sequences, round(usual.gain * UNIT), round(usual.spread * UNIT)),
                *(known.tokens_q10, known.cost_ns, catch_up, rounds_left),
            )
        self._regimes[size].promised = min(known.gain, UNIT)
        return self._regimes[size]
