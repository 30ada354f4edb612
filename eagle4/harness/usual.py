"""What calls of one size of batch gained by speculating: where the next one starts from.

Gains are in plain rounds per speculative round. The next call's is believed to lie evenly within
``spread`` of ``gain``: calls on texts of one kind teach that trying again is of no use, and calls
that differ that it is.
"""

from __future__ import annotations

from typing import NamedTuple

from .regime import TRIAL, UNIT, Regime

WIDEST, NARROWEST = 0.2, 0.02
_CALL_RATE = 0.3  # how much a call says about the next
_STOPPED_RATE = 0.5  # one that gave up speculating
_SPREAD_RATE = 0.5
_DOUBT = 0.25  # how fast a call that only decoded plainly forgets why
_HALF_WIDTH = 1.5  # of an even law, over the mean distance of two draws


class Usual(NamedTuple):
    """The running mean, the spread around it, and the last call's gain if there was one."""

    gain: float
    spread: float = WIDEST
    last: float | None = None

    def after(self, call: Regime) -> Usual:
        """What it is when ``call`` is over."""
        return self._after_rounds(call) if call.rounds else self._after_plain(call.promised / UNIT)

    def _after_rounds(self, call: Regime) -> Usual:
        gain = max(-1.0, min(call.gained / call.rounds / UNIT, 1.0))
        # Few rounds, as of one probe or where a batch runs out, say little.
        weight = min(call.rounds * call.num_sequences, TRIAL) / TRIAL
        rate = weight * (_CALL_RATE if call.speculating else _STOPPED_RATE)
        spread, last = self.spread, gain
        if self.last is not None:
            found = min(_HALF_WIDTH * abs(gain - self.last), WIDEST)
            spread = max(spread + weight * _SPREAD_RATE * (found - spread), NARROWEST)
            last = self.last + weight * (gain - self.last)
        return Usual(self.gain + rate * (gain - self.gain), spread, last)

    def _after_plain(self, promised: float) -> Usual:
        """The call never speculated, which says nothing about speculation.

        Belief moves towards what the calibration promises, and widens, so that a load which once
        did badly is looked at again.
        """
        gain = self.gain + _DOUBT * max(promised - self.gain, 0.0)
        return Usual(gain, self.spread + _DOUBT * (WIDEST - self.spread), self.last)
