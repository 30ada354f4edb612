"""From a feature store to batches of runs, in an order that a step number alone determines.

An epoch cuts every supervised segment into about ``length / M`` runs of M consecutive anchors at
jittered starts, shuffles them with a generator seeded by (seed, epoch), and deals them out in
batches. Nothing is remembered between steps, so resuming needs the position only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .features import FeatureSequence, FeatureStore
from .ttt import Runs


class Position(NamedTuple):
    """Where in the data a run stands: the next batch of an epoch."""

    epoch: int
    batch: int


def supervised_segments(mask: torch.Tensor) -> list[tuple[int, int]]:
    """Half-open ranges of slots t whose first prediction x_{t+2} is supervised."""
    edges = torch.diff(mask[2:].to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def split_held_out(num_sequences: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """(training, held-out) sequence indices.

    Each index is judged by itself, so a sequence keeps its side when the store grows. At least one
    is held out when the fraction is positive and there are two or more.
    """
    held_out = [i for i in range(num_sequences) if random.Random(f"{seed}/{i}").random() < fraction]
    if fraction and not held_out and num_sequences > 1:
        held_out = [num_sequences - 1]
    return sorted(set(range(num_sequences)) - set(held_out)), held_out


class RunSampler:
    """Batches of (sequence, first anchor) pairs for training."""

    def __init__(
        self,
        store: FeatureStore,
        sequences: Sequence[int],
        num_anchors: int,
        batch_size: int,
        seed: int,
    ):
        self.num_anchors, self.batch_size, self.seed = num_anchors, batch_size, seed
        self.sequences = list(sequences)
        self._segments = [
            (index, start, end)
            for index in sequences
            for start, end in supervised_segments(store.field(index, "mask"))
        ]
        if not self._segments:
            raise ValueError("no training sequence has a supervised token after its second one")
        self._cached: tuple[int, list[list[tuple[int, int]]]] | None = None

    def epoch(self, number: int) -> list[list[tuple[int, int]]]:
        """All batches of an epoch; the last one may be smaller."""
        if self._cached is None or self._cached[0] != number:
            rng = random.Random(self.seed * 1_000_003 + number)
            runs = [
                (index, start)
                for index, first, end in self._segments
                for start in self._starts(first, end, rng)
            ]
            rng.shuffle(runs)
            size = min(self.batch_size, len(runs))
            batches = [runs[i : i + size] for i in range(0, len(runs) - size + 1, size)]
            self._cached = number, batches
        return self._cached[1]

    def _starts(self, first: int, end: int, rng: random.Random) -> list[int]:
        m, length = self.num_anchors, end - first
        count = max(1, round(length / m))
        # half a run of overhang on both sides, clamped: slots near the edges get their share
        drawn = (-m / 2 + length * (i + rng.random()) / count for i in range(count))
        return [first + min(max(0, int(start)), max(0, length - m)) for start in drawn]

    def next(self, position: Position) -> tuple[list[tuple[int, int]], Position]:
        """The batch at a position and the position after it."""
        batches = self.epoch(position.epoch)
        batch = batches[position.batch]
        if position.batch + 1 < len(batches):
            return batch, Position(position.epoch, position.batch + 1)
        return batch, Position(position.epoch + 1, 0)


def held_out_runs(
    store: FeatureStore, sequences: Sequence[int], num_anchors: int
) -> list[tuple[int, int]]:
    """One run from the middle of every held-out segment: the same ones at every evaluation."""
    return [
        (index, start + max(0, (end - start - num_anchors) // 2))
        for index in sequences
        for start, end in supervised_segments(store.field(index, "mask"))
    ]


def assemble(
    store: FeatureStore, batch: list[tuple[int, int]], num_anchors: int, num_depths: int
) -> Runs:
    """Read the rows that a batch of runs needs. See `Runs` for shapes; float32 on the CPU."""
    parts = [_one(store[index], start, num_anchors, num_depths) for index, start in batch]
    features, tokens, slots, inputs, teachers, valid = zip(*parts, strict=True)
    return Runs(
        feature_NTH=torch.cat(features).float(),
        token_N=torch.cat(tokens),
        length_B=torch.tensor([len(part) for part in tokens]),
        slot_BM=torch.stack(slots),
        token_BKM=torch.stack(inputs),
        teacher_BJH=torch.stack(teachers).float(),
        valid_BKM=torch.stack(valid),
    )


def with_noise(runs: Runs, amplitude: float, seeds: Sequence[int]) -> Runs:
    """Runs whose features carry uniform noise of at most ``amplitude`` times their row's RMS.

    Of every row and tap by itself, because taps differ in scale; the teacher's states stay clean.
    ``seeds``: one per run, so that how a step's runs are shared out changes nothing. EAGLE-1's
    noise is of absolute size.
    """
    noisy = []
    for seed, clean_NTH in zip(seeds, runs.feature_NTH.split(runs.length_B.tolist()), strict=True):
        drawn_NTH = torch.rand(clean_NTH.shape, generator=torch.Generator().manual_seed(seed))
        scale_NT1 = amplitude * clean_NTH.square().mean(-1, keepdim=True).sqrt()
        noisy.append(clean_NTH + (2 * drawn_NTH - 1) * scale_NT1)
    return runs._replace(feature_NTH=torch.cat(noisy))


def _one(sequence: FeatureSequence, start: int, num_anchors: int, num_depths: int):
    ids, mask = sequence.ids.long(), sequence.mask
    num_slots = len(ids) - 1
    length = min(start + num_anchors, num_slots)
    slot_M = torch.arange(start, start + num_anchors)
    depth_K1 = torch.arange(num_depths)[:, None]
    input_KM, label_KM = slot_M + 1 + depth_K1, slot_M + 2 + depth_K1
    supervised_KM = (label_KM < len(ids)) & mask[label_KM.clamp_max(len(ids) - 1)]
    valid_KM = supervised_KM.cumprod(0).bool()
    teacher_J = torch.arange(start + 1, start + num_anchors + num_depths)
    return (
        sequence.taps[:length],
        ids[1 : length + 1],
        slot_M.clamp_max(length - 1),
        ids[input_KM.clamp_max(len(ids) - 1)],
        sequence.last[teacher_J.clamp_max(num_slots - 1)],
        valid_KM,
    )


def supervised_counts(store: FeatureStore, sequences: Sequence[int]) -> torch.Tensor:
    """How often every token of the vocabulary is supervised, int64 ``[V]``."""
    total = torch.zeros(store.manifest["target"]["vocab_size"], dtype=torch.int64)
    for index in sequences:
        ids, mask = store.field(index, "ids").long(), store.field(index, "mask")
        total += torch.bincount(ids[mask], minlength=len(total))
    return total
