"""Plain or speculative, and what a token is worth: the slow decisions between rounds.

The gain of a speculative round is what its tokens would have cost in plain rounds minus what they
did cost, in plain rounds; the long-run rate beats plain decoding exactly when its mean is positive.
Speculation stops when the recent mean is negative by more than its own standard error, and when a
call begins with promises that cost more than a plain round and do not come true. Plain decoding is
interrupted by probes of one round, so rarely that their price, catching up the drafter included,
stays near one hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from .fixed_point import ONE

Q = 20  # gains are integers in units of 2^-20 plain rounds
UNIT = 1 << Q
MARGIN = UNIT // 100  # smaller losses are not worth a switch
MEMORY, LEAST_MEMORY = 24, 6  # rounds of one sequence, of many, that the mean remembers
PRIOR_COUNT, PRIOR_VARIANCE = 4, UNIT // 10
FIRST_WAIT, LEAST_WAIT = 8, 24
PROBE_SHARE = 80  # a probe may cost 1/80 of the plain time before it
TRIAL = 8  # rounds after which a bad start is noticed
SERVES = 4  # calls like this one that what a trial teaches is good for
MOST_REST = 8  # plain rounds that are not thought about
FIRST_CHECK, LEAST_CHECK, CHECKS = 8, 32, 3  # rounds to plain rounds for comparison
RATE_MEMORY = 128  # rounds that the price of a token remembers
# Drafts that fit as often as promised, against drafts that fit five times less: odds, in 2^-30.
RARER = 5
REFUTED = ONE // 50
LEAST_ODDS, MOST_ODDS = ONE >> 16, ONE << 20  # what a call has shown is forgotten beyond these
SUREST = ONE - ONE // 5  # of a text that it has not seen, no calibration knows better


@dataclass
class Regime:
    """State for one batch size. All numbers are integers."""

    mean: int  # gain per speculative round
    variance: int = PRIOR_VARIANCE
    count: int = PRIOR_COUNT
    memory: int = MEMORY
    speculating: bool = True
    probing: bool = False
    unchecked: int = 0  # speculative rounds since plain decoding was measured
    waited: int = 0  # plain rounds since speculation stopped
    wait: int = FIRST_WAIT
    loss: int = 0  # expected of a probe, catching up apart
    spent: int = 0  # by the current probe, catching up apart
    tokens: int = 0  # fading sums of speculative rounds, tokens in 2^-10
    cost_ns: int = 0
    rounds: int = 0  # speculative ones
    gained: int = 0  # in all of them
    num_sequences: int = 1
    promised: int = 0  # gain by the calibration, latest
    # Since speculation began, with the call or with a probe:
    odds: int = ONE
    own: int = 0  # gain

    @classmethod
    def start(
        cls,
        num_sequences: int,
        gain: int,
        spread: int,
        tokens_q10: int,
        cost_ns: int,
        catch_up: int,
        rounds_left: int,
    ) -> Regime:
        """From an expected gain, and expected tokens and cost of a round (worth 8 rounds).

        The call's own gain is believed to lie evenly within ``spread`` of ``gain``.

        A round of many sequences says more than a round of one, so less of the past is needed.
        ``catch_up`` and ``rounds_left`` as in `decide`: a start that may turn out well is tried
        where calls are long enough to repay it.
        """
        size = num_sequences.bit_length()
        gain = min(gain, UNIT)
        price = catch_up + TRIAL * max(-gain, 0)
        return cls(
            gain,
            num_sequences=num_sequences,
            count=max(1, PRIOR_COUNT // size),
            memory=max(MEMORY // size, LEAST_MEMORY),
            speculating=SERVES * rounds_left * _upside(gain, spread) >= price,
            loss=max(-gain, 0),
            tokens=8 * tokens_q10,
            cost_ns=8 * max(cost_ns, 1),
        )

    def record(
        self, gain: int, tokens: int, cost_ns: int, fits: Sequence[tuple[int, bool]] = ()
    ) -> None:
        """A speculative round: its gain, its committed tokens and its predicted cost.

        ``fits``: the chance (2^-30) that a sequence's first token is a drafted one, and whether it
        was. Deeper nodes are accepted or lost together, so they say little more.
        """
        self.rounds += 1
        self.gained += gain
        self.own += gain
        for chance, hit in fits:
            self._weigh(min(chance, SUREST), hit)
        self.count = min(self.count + 1, self.memory)
        delta = gain - self.mean
        self.mean += delta // self.count
        self.variance += ((delta * delta >> Q) - self.variance) // self.count
        self.tokens += (tokens << 10) - self.tokens // RATE_MEMORY
        self.cost_ns += cost_ns - self.cost_ns // RATE_MEMORY
        if self.probing:
            self.spent -= gain

    def decide(self, catch_up: int, rounds_left: int) -> bool:
        """Whether the next round speculates.

        ``catch_up``: price of bringing the drafter up to date, in 2^-20 plain rounds;
        ``rounds_left``: rounds in which it could pay.
        """
        if not self.speculating:
            self.waited += 1
            is_due = self.waited >= self.wait
            price = catch_up + self.loss
            is_cheap = self.waited * UNIT >= PROBE_SHARE * price
            # A probe that could not pay any more is not made.
            if is_due and is_cheap and rounds_left * UNIT >= 16 * price:
                self._probe()
        elif self.probing and self.spent > 0:
            self._stop(loss=self.spent)
        elif self.is_losing:
            self._stop(loss=-self.mean)
        return self.speculating

    def rest(self, catch_up: int, rounds_left: int) -> int:
        """How many of the next rounds are plain whatever is asked; they count as waited.

        ``catch_up``, ``rounds_left`` as in `decide`: while the load stays the same, catching up
        grows dearer and rounds get fewer, so no probe is due earlier than it seems now.
        """
        if self.speculating:
            return 0
        price = catch_up + self.loss
        due = max(self.wait, -(-PROBE_SHARE * price // UNIT)) - self.waited - 1
        if rounds_left * UNIT < 16 * price:
            due = MOST_REST
        rest = min(max(due, 0), MOST_REST)
        self.waited += rest
        return rest

    def is_check_due(self, num_compared: int) -> bool:
        """Whether a plain round should be measured between speculative ones.

        Soon where it was rarely done; then so that forgone gains stay near one hundredth.
        """
        self.unchecked += 1
        due = FIRST_CHECK if num_compared < CHECKS else LEAST_CHECK
        if num_compared >= CHECKS:
            due = max(due, self.mean * 100 >> Q)
        if self.probing or self.unchecked < due:
            return False
        self.unchecked = 0
        return True

    @property
    def is_losing(self) -> bool:
        """Significantly worse than plain, or far from what was promised since it began."""
        if self.odds < REFUTED and self.own < -UNIT:
            return True
        error = isqrt(max(self.variance, 0) * UNIT // self.count)
        return self.mean < -MARGIN and self.mean + error < 0

    def token_ns(self, plain_token_ns: int) -> int:
        """What a token costs at the best rate known: plain decoding is always available."""
        if not self.tokens:
            return plain_token_ns
        return max(1, min(plain_token_ns, (self.cost_ns << 10) // self.tokens))

    def _probe(self) -> None:
        self.speculating = self.probing = True
        self.mean, self.variance, self.count, self.spent = 0, PRIOR_VARIANCE, 1, 0
        self.odds, self.own = ONE, 0

    def _weigh(self, chance: int, hit: bool) -> None:
        if hit:
            self.odds = min(self.odds * RARER, MOST_ODDS)
        else:
            odds = self.odds * (ONE - chance) // (ONE - chance // RARER)
            self.odds = max(odds, LEAST_ODDS)

    def _stop(self, loss: int) -> None:
        self.speculating = self.probing = False
        self.waited, self.wait, self.loss = 0, LEAST_WAIT, max(loss, 0)


def _upside(gain: int, spread: int) -> int:
    """Mean of a call's gain where it is positive (else nothing is lost: speculation stops)."""
    if gain >= spread:
        return gain
    return max(gain + spread, 0) ** 2 // (4 * spread)
