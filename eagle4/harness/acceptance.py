"""What acceptance means on this pair: draft probability and depth -> chance that the node is kept.

`Calibration` learns it from verdicts; it is monotone in the probability and starts from the belief
that a drafter is a little overconfident. A child counts only when its parent was accepted: deeper
ones were never put to the test. `Forecast` learns what the next level is going to look like before
it is drafted: the calibrated acceptance of a node's best, second, ... child.

All counts fade exponentially, so a shift of domain is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from .fixed_point import CELLS, DEPTHS, KNOTS, ONE, cell, depth_class
from .monotone import non_decreasing
from .usual import NARROWEST, Usual

RANKS = 16
FADE = 1 - 1 / 512  # per round
_PRIOR_TRUST = 0.85  # believed acceptance / draft probability
_POOL_WEIGHT, _DEPTH_WEIGHT = 2.0, 8.0  # trials that the prior and the pooled estimate count for
_FORECAST_WEIGHT = 4.0
_RANK_PRIOR = np.array([0.55, 0.12, 0.06] + [0.04] * (RANKS - 3))
_P = np.array(KNOTS) / ONE


class Book(NamedTuple):
    """What decisions look up: integers in units of 2^-30.

    ``accept[depth class][knot]``; ``forecast[depth of the parent][cell of its probability][rank]``;
    ``chain[depth]``: acceptance of the best child of the best node, index 0 unused.
    """

    accept: list[list[int]]
    forecast: list[list[list[int]]]
    chain: list[int]


class Calibration:
    """(draft probability, depth) -> acceptance, from weighted counts ``[depth class, knot]``."""

    def __init__(self):
        self.trials = np.zeros((DEPTHS, CELLS + 1))
        self.hits = np.zeros((DEPTHS, CELLS + 1))

    def observe(self, prob_q30: int, depth: int, accepted: bool) -> None:
        """One child of an accepted node (or of the root)."""
        i, row = cell(prob_q30), depth_class(depth)
        upper = min(max(prob_q30 - KNOTS[i], 0) / (KNOTS[i + 1] - KNOTS[i]), 1.0)
        for knot, weight in ((i, 1 - upper), (i + 1, upper)):
            self.trials[row, knot] += weight
            if accepted:
                self.hits[row, knot] += weight

    def fade(self, factor: float) -> None:
        """Forget: every count is multiplied."""
        self.trials *= factor
        self.hits *= factor

    def curves(self, parent: Calibration | None = None) -> np.ndarray:
        """Acceptance at the knots per depth class, shrunk to all depths together.

        ``parent`` (all requests, for a class of requests) takes the place of the general prior.
        """
        if parent is not None:
            prior = parent.curves()
        else:
            prior = np.tile(self._pooled(), (DEPTHS, 1))
        return np.stack(
            [
                _shrunk(*rows, _DEPTH_WEIGHT)
                for rows in zip(self.hits, self.trials, prior, strict=True)
            ]
        )

    def reliability(self) -> list[dict[str, float]]:
        """Data of a reliability diagram: draft probability, observed and calibrated acceptance."""
        trials, hits = self.trials.sum(axis=0), self.hits.sum(axis=0)
        return [
            {
                "probability": float(p),
                "observed": float(h / t),
                "calibrated": float(f),
                "trials": float(t),
            }
            for p, h, t, f in zip(_P, hits, trials, self._pooled(), strict=True)
            if t > 0
        ]

    def _pooled(self) -> np.ndarray:
        hits, trials = self.hits.sum(axis=0), self.trials.sum(axis=0)
        return _shrunk(hits, trials, _PRIOR_TRUST * _P, _POOL_WEIGHT)


class Forecast:
    """Calibrated acceptance of the children of a node that has not been expanded yet."""

    def __init__(self):
        self.weight = np.zeros((DEPTHS + 1, CELLS))
        self.total = np.zeros((DEPTHS + 1, CELLS, RANKS))
        self.chain_weight = np.zeros(DEPTHS + 1)
        self.chain_total = np.zeros(DEPTHS + 1)

    def observe(
        self, depth: int, prob_q30: int, children_q30: Sequence[int], is_best: bool
    ) -> None:
        """The children of a node at ``depth`` (0: the root) with draft probability ``prob_q30``."""
        row, column = min(depth, DEPTHS), cell(prob_q30) if depth else 0
        children = children_q30[:RANKS]
        self.weight[row, column] += 1
        self.total[row, column, : len(children)] += [value / ONE for value in children]
        if is_best:
            self.chain_weight[row] += 1
            self.chain_total[row] += children[0] / ONE

    def fade(self, factor: float) -> None:
        """Forget: every count is multiplied."""
        for table in (self.weight, self.total, self.chain_weight, self.chain_total):
            table *= factor

    def tables(self) -> tuple[list[list[list[int]]], list[int]]:
        """``forecast`` and ``chain`` of a `Book`."""
        extra = _FORECAST_WEIGHT
        mass_D1 = self.weight.sum(axis=1)[:, None]
        mean_DR = (self.total.sum(axis=1) + extra * _RANK_PRIOR) / (mass_D1 + extra)
        cells = (self.total + extra * mean_DR[:, None]) / (self.weight[..., None] + extra)
        chain = (self.chain_total + extra * _RANK_PRIOR[0]) / (self.chain_weight + extra)
        return _q30(cells), [0, *_q30(chain)]


class Experience:
    """Everything that a harness has learned about a pair: calibrations, forecast, usual gain.

    ``classes``: calibrations per class of requests; every observation also counts for ``overall``.
    ``usual``: what speculation gained in earlier calls, by the batch size in bits.
    """

    def __init__(self):
        self.overall = Calibration()
        self.classes: dict[str, Calibration] = {}
        self.forecast = Forecast()
        self.usual: dict[int, Usual] = {}
        self.rounds = 0

    def observe(self, prob_q30: int, depth: int, accepted: bool, request_class: str = "") -> None:
        """One child whose parent was accepted."""
        self.overall.observe(prob_q30, depth, accepted)
        if request_class:
            own = self.classes.setdefault(request_class, Calibration())
            own.observe(prob_q30, depth, accepted)

    def fade(self, rounds: int) -> None:
        """Forget what is ``rounds`` older now."""
        self.rounds += rounds
        for part in (self.overall, self.forecast, *self.classes.values()):
            part.fade(FADE**rounds)

    def book(self, request_class: str = "") -> Book:
        """The tables that decisions read."""
        own = self.classes.get(request_class)
        curves = self.overall.curves() if own is None else own.curves(self.overall)
        forecast, chain = self.forecast.tables()
        return Book(_q30(curves), forecast, chain)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tables = {"": self.overall, **self.classes}
        forecast = self.forecast
        return {
            "rounds": self.rounds,
            "usual": {str(size): list(usual) for size, usual in self.usual.items()},
            "calibration": {
                name: {"trials": c.trials.tolist(), "hits": c.hits.tolist()}
                for name, c in tables.items()
            },
            "forecast": {name: getattr(forecast, name).tolist() for name in _FORECAST_FIELDS},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Experience:
        """Raises `ValueError`, `KeyError` or `TypeError` for what `to_dict` never wrote."""
        new = cls()
        new.rounds = int(values["rounds"])
        # Profiles of older versions have gains alone, under another name.
        new.usual = {int(size): _usual(*found) for size, found in values.get("usual", {}).items()}
        for name, tables in values["calibration"].items():
            own = new.overall if name == "" else new.classes.setdefault(name, Calibration())
            own.trials = _like(own.trials, tables["trials"])
            own.hits = _like(own.hits, tables["hits"])
        for name in _FORECAST_FIELDS:
            like = getattr(new.forecast, name)
            setattr(new.forecast, name, _like(like, values["forecast"][name]))
        return new


_FORECAST_FIELDS = ("weight", "total", "chain_weight", "chain_total")


def _usual(gain: float, spread: float, last: float | None) -> Usual:
    usual = Usual(float(gain), float(spread), None if last is None else float(last))
    numbers = [number for number in usual if number is not None]
    if not all(map(isfinite, numbers)) or usual.spread < NARROWEST:
        raise ValueError(f"what is usual must be finite and spread by {NARROWEST}, got {usual}")
    return usual


def _shrunk(hits: np.ndarray, trials: np.ndarray, prior: np.ndarray, weight: float) -> np.ndarray:
    weights = trials + weight
    values = (hits + weight * prior) / weights
    return np.clip(non_decreasing(values.tolist(), weights.tolist()), 0.0, 1.0)


def _q30(values: np.ndarray) -> list:
    return np.clip(np.rint(values * ONE), 0, ONE).astype(np.int64).tolist()


def _like(shape: np.ndarray, values: Any) -> np.ndarray:
    """``values`` as counts, if they have the shape of ``shape``."""
    table = np.asarray(values, dtype=np.float64)
    if table.shape != shape.shape or not ((table >= 0) & (table < 1e15)).all():
        raise ValueError("a table of the experience has a wrong shape or impossible counts")
    return table
