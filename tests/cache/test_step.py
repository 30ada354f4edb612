"""Catches: a row that sees one entry too many or too few, a position or slot that is off by one,
windows counted in indices instead of positions, keys read in place that the gather would not read.

The judge knows nothing of slots or masks: it remembers what every sequence stored, entry by entry,
and attends in float64 over what the definition of visibility names.
"""

from __future__ import annotations

import random

import pytest
import torch
from packed import ancestry

from eagle4.cache import KVPool, PageTable, Window, attend, build_step
from eagle4.cache.layer import read
from eagle4.cache.reach import windowed

HEADS, HEADS_KV, WIDTH = 4, 2, 8
PAGE = 8


class Judge:
    """Keys, values and positions of one sequence, by index."""

    def __init__(self):
        self.key, self.value, self.position = [], [], []

    def attend(self, query: torch.Tensor, position: int, seen: list[int], window: int | None):
        inside = [i for i in seen if window is None or position - self.position[i] < window]
        key = torch.stack([self.key[i] for i in inside]).double()
        value = torch.stack([self.value[i] for i in inside]).double()
        out = []
        for head in range(HEADS):
            kv_head = head // (HEADS // HEADS_KV)
            score = key[:, kv_head] @ query[head].double() * WIDTH**-0.5
            out.append(score.softmax(0) @ value[:, kv_head])
        return torch.stack(out)


class World:
    """Sequences that grow by chunks and trees, with a pool and a judge each."""

    def __init__(self, seed: int, num_sequences: int, is_scattered: bool):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.table, self.pool = PageTable(num_sequences, PAGE), KVPool()
        sizes = range(PAGE, 8 * PAGE + 1, PAGE) if is_scattered else [8 * PAGE]
        for size in sizes:
            for sequence in range(num_sequences):
                self.table.ensure(sequence, size)
        self.pool.resize(self.table.num_slots)
        self.judges = [Judge() for _ in range(num_sequences)]

    def rows(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, WIDTH, generator=self.generator)

    def forward(self, windows: list[Window], window: int | None, gathers: bool = False):
        """Run the windows packed; returns the step, the rows' output and the judge's."""
        step = build_step(self.table, windows, torch.device("cpu"), gathers=gathers)
        total = sum(len(w.visible) for w in windows)
        query, key, value = (self.rows(total, h) for h in (HEADS, HEADS_KV, HEADS_KV))
        out = attend(self.pool, 0, step, query, key, value, sliding_window=window)
        expected, row = [], 0
        for w in windows:
            judge, first = self.judges[w.sequence], w.prefix + w.offset
            for kind in (judge.key, judge.value, judge.position):
                del kind[first:]
            positions = w.position[w.offset :].tolist()
            judge.position += positions
            judge.key += list(key[row : row + len(positions)])
            judge.value += list(value[row : row + len(positions)])
            for i, position in enumerate(positions):
                assert int(step.position_R[row + i]) == position
                entries = w.visible[i].nonzero().squeeze(1) + w.prefix
                seen = [*range(w.prefix), *entries.tolist()]
                expected.append(judge.attend(query[row + i], position, seen, window))
            row += len(positions)
        return step, out, torch.stack(expected)


def chunk(sequence: int, prefix: int, count: int) -> Window:
    position = torch.arange(prefix, prefix + count)
    return Window(sequence, prefix, 0, position, torch.ones(count, count, dtype=torch.bool).tril())


def tree(rng: random.Random, sequence: int, prefix: int) -> tuple[Window, list[int]]:
    parents = [rng.randint(-1, node - 1) for node in range(rng.randint(1, 7))]
    seen = ancestry(parents)
    return Window(sequence, prefix, 0, prefix + seen.sum(dim=1) - 1, seen), parents


def check(world: World, windows: list[Window], sliding: int | None):
    step, out, expected = world.forward(windows, sliding)
    assert torch.isfinite(out).all()
    assert float((out - expected).abs().max()) < 5e-6
    return step


@pytest.mark.parametrize("is_scattered", [False, True], ids=["view", "gather"])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_sees_exactly_what_the_definition_names(seed, is_scattered):
    """Prefill, chunks, trees in one or two steps, commits with compaction, then trees again."""
    count = 1 + seed % 3
    world = World(seed, count, is_scattered)
    rng = world.rng
    sliding = [None, 3, 6][seed // 3 % 3]
    lengths = [rng.randint(1, 9) for _ in range(count)]
    order = rng.sample(range(count), count) if is_scattered else range(count)
    check(world, [chunk(s, 0, lengths[s]) for s in order], sliding)
    for _ in range(3):
        windows, parents = [], {}
        for s in order:
            found, parents[s] = tree(rng, s, lengths[s])
            windows.append(found)
        split = [rng.randint(0, len(w.visible) - 1) for w in windows]
        early = [
            w._replace(position=w.position[:n], visible=w.visible[:n, :n])
            for w, n in zip(windows, split, strict=True)
            if n
        ]
        late = [
            w._replace(offset=n, visible=w.visible[n:]) for w, n in zip(windows, split, strict=True)
        ]
        if early:
            check(world, early, sliding)
        step = check(world, late, sliding)
        assert (step.slot_BL is None) == (not is_scattered or count == 1)
        for s in order:
            lengths[s] += commit(world, s, lengths[s], parents[s])


def commit(world: World, sequence: int, prefix: int, parents: list[int]) -> int:
    """Move a random path to the front of the window, in the pool and in the judge's memory."""
    path, node = [], world.rng.randrange(len(parents))
    while node >= 0:
        path.insert(0, prefix + node)
        node = parents[node]
    slots = world.table.slots(sequence, 0, prefix + len(parents))
    world.pool.move(
        torch.tensor([slots[i] for i in path]), torch.tensor(slots[prefix : prefix + len(path)])
    )
    judge = world.judges[sequence]
    for kind in (judge.key, judge.value, judge.position):
        kind[prefix:] = [kind[i] for i in path]
    return len(path)


@pytest.mark.parametrize("sequences", [[0], [3], [0, 1], [0, 1, 2, 3], [0, 1, 3], [2, 0], [2, 1]])
def test_every_way_to_read_agrees(sequences):
    """Sequences in one piece are read where they lie, in any order; others are gathered."""
    outs = []
    for is_scattered, gathers in ((False, False), (False, True), (True, False)):
        world = World(7, 4, is_scattered)
        windows = [chunk(s, 0, 4 + s) for s in sequences]
        world.forward(windows, None, gathers)
        windows = [chunk(s, 4 + s, 2 + s) for s in sequences]
        step, out, _ = world.forward(windows, 5, gathers)
        in_place = not is_scattered and not (gathers and len(sequences) > 1)
        assert (step.slot_BL is None) == in_place
        assert (step.reaches is not None) == (in_place and len(sequences) > 1)
        outs.append(out)
    for out in outs[1:]:
        torch.testing.assert_close(outs[0], out, atol=1e-6, rtol=1e-5)


def test_sequences_do_not_feel_each_other():
    """Bit for bit: a long neighbour pads nothing. Gathered, it may change the order of sums."""
    outs = []
    for others in ([], [2], [1, 3]):
        world = World(11, 4, False)
        own = world.rows(9, HEADS), world.rows(9, HEADS_KV), world.rows(9, HEADS_KV)
        windows = [chunk(0, 0, 9), *(chunk(s, 0, 3 + 9 * s) for s in others)]
        step = build_step(world.table, windows, torch.device("cpu"))
        rest = len(step.position_R) - 9
        rows = [torch.cat([r, world.rows(rest, r.shape[1])]) for r in own]
        outs.append(attend(world.pool, 0, step, *rows)[:9])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[1], outs[2])


def test_a_view_is_a_view():
    world = World(0, 2, False)
    world.forward([chunk(1, 0, 5)], None)
    step, _, _ = world.forward([chunk(1, 5, 2)], None)
    stored = world.pool.layers[0][0]
    seen = read(step.layer(stored, stored, groups=1), stored)
    assert seen.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()


@pytest.mark.parametrize("sliding", [None, 2])
def test_padding_rows_are_finite(sliding):
    """Unequal rows are padded; a padding row repeats a real one and sees what that one sees."""
    world = World(3, 3, False)
    windows = [chunk(0, 0, 1), chunk(1, 0, 6), chunk(2, 0, 3)]
    step, _, _ = world.forward(windows, sliding, gathers=True)
    assert step.shape == (3, 6, 6)
    visible = windowed(step.visible_BML, step.query_position_BM, step.key_position_BL, sliding)
    assert visible.any(dim=-1).all(), "a row that sees nothing is NaN"
    for b, count in ((0, 1), (2, 3)):
        for row in range(count, 6):
            assert torch.equal(visible[b, row], visible[b, 0])
    rows = torch.arange(10)
    assert torch.equal(rows[step.pad_BM].flatten(0, 1)[step.unpad_R], rows)
