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
from .fixed_point import BITS, MOST_NS
from .nodes import DraftRecord, Nodes
from .outlook import Outlook, Outlooks, Shape
from .policy import Prices
from .regime import TRIAL, UNIT, Q, Regime
from .report import HarnessReport, Round
from .wide import WideNodes

BOOK_ROUNDS = 8  # rounds between two looks at what was learned
SETTLE_ROUNDS = 64
WIDE = 16  # sequences from which decisions are made in tensor code
_TRUST_PRIOR = 8 << BITS  # accepted nodes' worth of belief in the calibration
_USUAL_RATE = 0.3
_STOPPED_RATE = 0.5  # a call that gave up speculating says more than others
_REVISIT_RATE = 0.15  # how fast a call that only decoded plainly forgets why


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
        self._regimes: dict[int, Regime] = {}
        self._known: dict[int, int] = {}  # latest expectation, like the gain of a regime
        self._outlooks = Outlooks(config, table)
        self._accepted = self._promised = 0  # fading sums in 2^-30 nodes
        self._rounds = 0
        self._nodes: Nodes | WideNodes = Nodes([], self.book)
        self._load, self._round = Load(1), Round()
        self._prices: Prices | None = None
        self._tokens: list[list[int]] = []
        self._chosen: list[list[int]] = []
        self._num_verified: int | None = None  # nodes of the round; None before they are known

    def plan(self, load: Load) -> Plan:
        """Plain or speculative; the limits within which the round's decisions are made."""
        self._load, self._prices, self._chosen, self._tokens = load, None, [], []
        self._nodes, self._num_verified = Nodes([], self.book), None
        plain_ns = self.table.cost_ns("plain", load.num_sequences, load.context)
        known, hoped = self._outlooks.of(load, self.book, self._rounds // SETTLE_ROUNDS)
        extra = max(0, load.pending - 2 * load.num_sequences)
        catch_up = self._root_ns(load, load.pending) - self._root_ns(load, load.pending - extra)
        setting = (catch_up << Q) // plain_ns, known.rounds_left(load)
        regime = self._regime(load, known, *setting)
        is_hopeless = hoped.gain <= 0
        speculative = not is_hopeless and regime.decide(*setting)
        compared = self.table.num_compared(load.num_sequences)
        is_check = speculative and not self.table.frozen and regime.is_check_due(compared)
        speculative = speculative and not is_check
        self._round = Round(speculative, load, plain_ns=plain_ns, is_probe=regime.probing)
        self._round.is_check, self._round.is_hopeless = is_check, is_hopeless
        if not speculative:
            return Plan(False, 0, 0, 0)
        return Plan(True, self.config.max_depth, self.config.width, self.config.max_nodes)

    @property
    def is_plain(self) -> bool:
        """The last round was planned without a draft."""
        return not self._round.speculative

    @property
    def is_hopeless(self) -> bool:
        """At this load not even a perfect drafter would pay."""
        return self._round.is_hopeless

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
        self._round.token_ns = self._regimes[_size(self._load)].token_ns(
            self._round.plain_ns // self._load.num_sequences
        )

    def timed(self, kind: str, rows: int, ns: int) -> None:
        """One part of the draft took ``ns``."""
        self._round.cost_ns += self.table.cost_ns(kind, rows, self._load.context)
        self._round.measured_ns += ns
        self.table.refine(kind, rows, self._load.context, ns)

    def observe(self, tokens: Sequence[Sequence[int]], stage_ns: Mapping[str, int]) -> None:
        """Learn from the committed tokens and from what verification took."""
        done, load = self._round, self._load
        batch, context = load.num_sequences, load.context
        target_ns = stage_ns.get("verify", 0) + stage_ns.get("commit", 0)
        done.tokens = sum(map(len, tokens))
        done.measured_ns += target_ns
        if done.speculative and self._num_verified is not None:
            verified = self._num_verified
            done.rows = batch + verified
            done.cost_ns += self.table.verify_curve(batch, verified, context)[-1]
            self.table.refine_verify(batch, verified, context, target_ns)
            self._record([] if self._prices is None else self._learn(tokens))
        else:
            done.cost_ns += done.plain_ns
            learn = self.table.refine_plain if not done.is_check else self.table.compare_plain
            learn(batch, context, target_ns)
        self.report.add(done, self._nodes.for_report(), self._chosen, self._tokens)
        self._rounds += 1
        if self._rounds % SETTLE_ROUNDS == 0:
            self.table.settle()
        if self._rounds % BOOK_ROUNDS == 0 or self._rounds == 2:
            self.experience.fade(BOOK_ROUNDS)
            self.book = self.experience.book(self.config.request_class)

    def _learn(self, tokens: Sequence[Sequence[int]]) -> list[tuple[int, bool]]:
        """From a round's nodes; what `Regime.record` wants to know of them."""
        done, nodes = self._round, self._nodes
        for b, (own, committed) in enumerate(zip(self._tokens, tokens, strict=False)):
            nodes.learn(b, own, committed, self.experience, self.config.request_class)
        accepted = (done.tokens - len(tokens)) << BITS
        self._accepted += accepted - (self._accepted >> 5)
        self._promised += done.promised_q30 - (self._promised >> 5)
        return nodes.for_report().fits(self._chosen, self._tokens, tokens)

    def _record(self, fits: Sequence[tuple[int, bool]]) -> None:
        """The gain of a speculative round."""
        done, load = self._round, self._load
        # Catching up after plain rounds is priced by the probe.
        extra = self._root_ns(load, load.pending) - self._root_ns(load, 2 * load.num_sequences)
        cost_ns = max(1, done.cost_ns - max(extra, 0))
        gain_ns = done.tokens * done.plain_ns // load.num_sequences - cost_ns
        gain = (gain_ns << Q) // done.plain_ns
        self._regimes[_size(load)].record(gain, done.tokens, cost_ns, fits)

    def finish(self) -> None:
        """The call is over: fold what was typical into the experience.

        A call that never speculated says nothing about speculation. Its belief moves towards what
        the calibration promises, so that a load which once did badly is looked at again.
        """
        for size, regime in self._regimes.items():
            gain, rate = regime.mean, _STOPPED_RATE
            if not regime.rounds:
                gain, rate = max(self._known[size], gain), _REVISIT_RATE
            elif regime.speculating:  # few rounds, as where a batch runs out, say little
                rate = _USUAL_RATE * min(regime.rounds, TRIAL) / TRIAL
            gain, known = (min(g, UNIT) / UNIT for g in (gain, self._known[size]))
            self.experience.fold_gain(size, gain, rate, known)

    def price(self, top_k: int) -> Prices:
        """What this round's decisions cost, for levels of up to ``top_k`` nodes."""
        load, cost = self._load, self.table.cost_ns
        batch, context = load.num_sequences, load.context
        regime = self._regimes[_size(load)]
        token_ns = regime.token_ns(self._round.plain_ns // batch)
        trust = 1 << 10
        if not regime.probing:  # which believes the calibration, to verify a node at all
            trust = ((_TRUST_PRIOR + self._accepted) << 10) // (_TRUST_PRIOR + self._promised)
        self._round.token_ns = min(token_ns * min(max(trust, 128), 1280) >> 10, MOST_NS)
        return Prices(
            self._round.token_ns,
            self.table.verify_curve(batch, batch * self.config.max_nodes, context),
            [cost("level", batch * max(w, 1), context) for w in range(top_k + 1)],
            self.config.max_nodes,
        )

    def _root_ns(self, load: Load, rows: int) -> int:
        return self.table.cost_ns("root", max(rows, 1), load.context)

    def _regime(self, load: Load, known: Outlook, catch_up: int, rounds_left: int) -> Regime:
        size = _size(load)
        self._known[size] = known.gain
        if size not in self._regimes:
            usual = self.experience.usual_gain.get(size)
            gain = known.gain if usual is None else round(usual * UNIT)
            self._regimes[size] = Regime.start(
                *(load.num_sequences, gain, known.tokens_q10, known.cost_ns),
                *(catch_up, rounds_left),
            )
        return self._regimes[size]


def _size(load: Load) -> int:
    """Batch sizes that share a regime: powers of two."""
    return load.num_sequences.bit_length()
