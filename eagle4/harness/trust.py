"""How far recent rounds bear out what the calibration promised."""

from __future__ import annotations

from .fixed_point import BITS

_PRIOR = 8 << BITS  # accepted nodes' worth of belief in the calibration
_FADE = 5  # the last 2^5 rounds count
_ONE, _LEAST, _MOST = 1 << 10, 128, 1280


class Trust:
    """Accepted over promised nodes, as fading sums in 2^-30 nodes."""

    def __init__(self):
        self._accepted = self._promised = _PRIOR

    def learn(self, accepted: int, promised_q30: int) -> None:
        """A round's accepted nodes, and what was expected of them."""
        self._accepted += (accepted << BITS) - (self._accepted - _PRIOR >> _FADE)
        self._promised += promised_q30 - (self._promised - _PRIOR >> _FADE)

    def scale(self, worth: int) -> int:
        """``worth`` times accepted over promised nodes."""
        share = _ONE * self._accepted // self._promised
        return worth * min(max(share, _LEAST), _MOST) // _ONE
