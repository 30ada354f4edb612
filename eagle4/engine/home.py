"""Where a pair's harness lives between calls: cost table and experience, in memory and on disk.

Looked up in this order: this object, the cache folder (``EAGLE4_PROFILES``, else ``profiles`` in
eagle4's cache folder), a coarse measurement of a few seconds. Small requests are not worth a
measurement; without a table they run with the configured limits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..config import SpeculativeConfig
from ..drafter import Eagle4Drafter
from ..harness import CostTable, HarnessPolicy
from ..harness.acceptance import Experience
from ..harness.agreed import AgreedTable
from ..harness.profile_file import file_name, read, read_or_none, write
from ..machine import cache_dir, device_name, package_version
from ..parallel import Ranks
from ..target import TargetAdapter
from .canvas import TreeLimits
from .graphs import EAGER, Graphs
from .measure import COARSE, Grid, measure
from .parts import make_cases
from .warmup import warm_up

WORTH_TOKENS = 64  # new tokens of a request that justify a measurement
SAVE_ROUNDS = 512  # rounds of experience between two writes

logger = logging.getLogger("eagle4")


class Profile(NamedTuple):
    """What is known about a pair on this machine."""

    table: CostTable
    experience: Experience


class HarnessHome:
    """The profile of one pair. `policy` is asked once per call, `settle` told at its end.

    Ranks that share the pair look and measure together, and end up with one profile.
    """

    def __init__(self, ranks: Ranks | None = None):
        self.ranks = ranks
        self._profile: Profile | None = None
        self._saved_rounds = 0
        self._num_measured = 0

    def policy(
        self,
        config: SpeculativeConfig,
        target: TargetAdapter,
        drafter: Eagle4Drafter,
        num_tokens: int,
        graphs: Graphs = EAGER,
    ) -> HarnessPolicy | None:
        """A policy for one call of up to ``num_tokens`` new tokens; None without a table.

        Raises `ValueError` when ``config.profile`` is broken or from another setup, `OSError` when
        it cannot be read.
        """
        here = self._fingerprint(target, drafter, graphs)
        if config.profile is not None:
            path = Path(config.profile)
            found = self._agreed(lambda: Profile(*read(path, here, frozen=True)))
            assert found is not None
            return HarnessPolicy(config, *found)
        if self._profile is None or self._profile.table.fingerprint != here:
            self._profile = self._find(here, target, drafter, num_tokens, graphs)
            if self._profile is None:
                return None
            self._saved_rounds = self._profile.experience.rounds
        return HarnessPolicy(config, *self._profile)

    def settle(self, policy: HarnessPolicy) -> None:
        """A call has finished: keep what it taught, now and then on disk.

        Costs that were measured in a disturbed moment could rule out speculation for good: where
        the first rounds contradict them they are measured once more.
        """
        profile = self._profile
        if profile is None or policy.table is not profile.table:
            return
        if self._num_measured == 1 and profile.table.is_off:
            logger.info("the costs were measured in a disturbed moment; they are measured again")
            self._profile = None
            if self.ranks is None or self.ranks.is_first:
                profile_path(profile.table.fingerprint).unlink(missing_ok=True)
            return
        if profile.experience.rounds - self._saved_rounds >= SAVE_ROUNDS:
            self._saved_rounds = profile.experience.rounds
            self._save(profile)

    def _find(
        self,
        here: dict[str, Any],
        target: TargetAdapter,
        drafter: Eagle4Drafter,
        num_tokens: int,
        graphs: Graphs,
    ) -> Profile | None:
        path = profile_path(here)
        found = self._agreed(lambda: _profile_or_none(path, here))
        if found is not None or num_tokens < WORTH_TOKENS:
            return found
        logger.info("measuring the costs of this pair once (a few seconds)")
        table = measure_pair(target, drafter, COARSE, here, graphs)
        self._num_measured += 1
        profile = self._agreed(lambda: Profile(table, Experience()))
        assert profile is not None
        self._save(profile)
        return profile

    def _save(self, profile: Profile) -> None:
        if self.ranks is None or self.ranks.is_first:
            _save(profile)

    def _fingerprint(
        self, target: TargetAdapter, drafter: Eagle4Drafter, graphs: Graphs
    ) -> dict[str, Any]:
        """Rank 0's: names of devices may differ, decisions must not."""
        here = fingerprint(target, drafter, graphs)
        return here if self.ranks is None else self.ranks.gather_objects(here)[0]

    def _agreed(self, look: Callable[[], Profile | None]) -> Profile | None:
        """What ``look`` finds; with ranks the slowest of their tables and rank 0's experience.

        None as soon as one rank finds nothing. An error of one rank is an error of all.
        """
        if self.ranks is None:
            return look()
        try:
            outcome = look()
        except (ValueError, OSError) as error:
            outcome = error
        outcomes = self.ranks.gather_objects(outcome)
        for found in outcomes:
            if isinstance(found, Exception):
                raise found
        if any(found is None for found in outcomes):
            return None
        tables = [found.table for found in outcomes]
        return Profile(AgreedTable(tables, self.ranks.largest), outcomes[0].experience)


def _profile_or_none(path: Path, here: dict[str, Any]) -> Profile | None:
    found = read_or_none(path, here)
    return None if found is None else Profile(*found)


def measure_pair(
    target: TargetAdapter,
    drafter: Eagle4Drafter,
    grid: Grid,
    here: dict[str, Any] | None = None,
    graphs: Graphs = EAGER,
) -> CostTable:
    """Measure a pair within the default limits; call it where packed weights are active."""
    device, vocab = target.device, target.vocab
    limits = TreeLimits.of(SpeculativeConfig(), drafter)
    for batch in (1, 2):
        warm_up(graphs, target, drafter, batch, limits)
    # Ranks measure together, so they also stop together.
    agree = bool if vocab is None else lambda over: bool(vocab.ranks.first([over])[0])
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with torch.no_grad(), target.attached(run_blocks=graphs.blocks):
        cases = make_cases(target, drafter, grid, limits, graphs)
        # Nothing is recorded while the clock runs: pools are made, a shape is seen, recorded.
        for case in [*cases.values()] * (3 if graphs.replays is not None else 0):
            case()
        here = here or fingerprint(target, drafter, graphs)
        return measure(cases, grid, here, synchronize, agree)


def profile_path(here: dict[str, Any]) -> Path:
    """The file of a fingerprint in the cache folder."""
    own = os.environ.get("EAGLE4_PROFILES")
    return (Path(own).expanduser() if own else cache_dir() / "profiles") / file_name(here)


def fingerprint(
    target: TargetAdapter, drafter: Eagle4Drafter, graphs: Graphs = EAGER
) -> dict[str, Any]:
    """Everything that a measured nanosecond depends on, as plain values."""
    versions = {name: package_version(name) for name in ("torch", "transformers", "eagle4")}
    return {
        "device": device_name(target.device),
        "target": _identity(target.config),
        "drafter": _identity(drafter.config),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": "packed",
        "compile": "inductor" if graphs.compiled else "eager",
        "launch": "direct" if graphs.replays is None else "graphs",
        "threads": torch.get_num_threads() if target.device.type == "cpu" else None,
        "packed_weights": os.environ.get("EAGLE4_PACK_WEIGHTS", "1"),
        "tensor_parallel": 1 if target.vocab is None else target.vocab.ranks.size,
        "versions": versions,
    }


def _identity(config: PreTrainedConfig) -> str:
    text = json.dumps(config.to_diff_dict(), sort_keys=True, default=str)
    return f"{config.model_type} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _save(profile: Profile) -> None:
    path = profile_path(profile.table.fingerprint)
    try:
        write(path, *profile)
    except OSError as error:
        logger.warning("the harness profile could not be saved: %s", error)
