"""Catches: verification that touches the committed state, a replay of other rows than the accepted
ones or of another sequence's, a state that depends on the tree around the path, snapshots of the
wrong length, a half-written state that is used again, payloads as large as states.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from packed import Rows, chain, window
from torch.nn import functional

from eagle4.cache import (
    AttentionStep,
    PageTable,
    RecurrentPool,
    StateRows,
    StateShape,
    build_step,
    convolve,
    mix,
)
from eagle4.ops.tree_gdn import tree_gdn_reference

SHAPE = StateShape(channels=6, width=4, heads=4, key_width=8, value_width=5)
GROUPS, LAYERS = 2, (1, 4)  # two recurrent layers of a larger model
TREE = [-1, 0, 0, 1, 2, 4, 1]
PATH = [0, 2, 4, 5]


class Inputs(NamedTuple):
    """What the rows of one forward bring along."""

    conv: torch.Tensor
    query: torch.Tensor
    rows: StateRows


def inputs(count: int, seed: int) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    key = functional.normalize(normal(count, GROUPS, SHAPE.key_width), dim=-1)
    decay, beta = -normal(count, SHAPE.heads).abs(), normal(count, SHAPE.heads).sigmoid()
    rows = StateRows(key, normal(count, SHAPE.heads, SHAPE.value_width), decay, beta)
    return Inputs(normal(count, SHAPE.channels), torch.randn_like(key), rows)


def pick(given: Inputs, rows: list[int]) -> Inputs:
    parts = (None if x is None else x[rows] for x in given.rows)
    return Inputs(given.conv[rows], given.query[rows], StateRows(*parts))


class World:
    """A pool with `LAYERS` alike and a page table that only makes steps."""

    def __init__(self, shape: StateShape = SHAPE):
        self.pool = RecurrentPool(shape, list(LAYERS), torch.float32, torch.device("cpu"))
        self.table = PageTable(8)
        self.weight = torch.randn(shape.channels, shape.width, generator=torch.Generator())

    def step(self, *parts: Rows, is_prompt: bool = False) -> AttentionStep:
        for part in parts:
            self.table.ensure(part.sequence, part.prefix + len(part.tokens))
        windows = [window(part) for part in parts]
        return build_step(self.table, windows, torch.device("cpu"), is_prompt)

    def run(self, given: Inputs, *parts: Rows, is_prompt: bool = False) -> list[torch.Tensor]:
        """One forward; the outputs of convolution and recurrence of the last layer."""
        step = self.step(*parts, is_prompt=is_prompt)
        assert step.lineage is not None
        self.pool.begin(step.lineage)
        out = []
        for layer in LAYERS:
            out = [convolve(self.pool, layer, step, given.conv, self.weight, None)]
            if self.pool.shape.heads:
                out.append(mix(self.pool, layer, step, given.query, given.rows))
        self.pool.finish()
        return out

    def prompt(self, given: Inputs, *sequences: int, prefix: int = 0) -> list[torch.Tensor]:
        count = len(given.conv) // len(sequences)
        parts = [chain(s, prefix, [0] * count) for s in sequences]
        return self.run(given, *parts, is_prompt=True)

    def content(self, sequence: int) -> list[torch.Tensor]:
        self.pool.settle()
        return [
            self.pool.conv_LSWC[:, sequence].clone(),
            self.pool.state_LSHKV[:, sequence].clone(),
        ]


def tree(sequence: int, prefix: int, parent: list[int] = TREE) -> Rows:
    return Rows(sequence, prefix, [0] * len(parent), parent)


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def together(*given: Inputs) -> Inputs:
    rows = StateRows(*(torch.cat(parts) for parts in zip(*(x.rows for x in given), strict=True)))
    return Inputs(torch.cat([x.conv for x in given]), torch.cat([x.query for x in given]), rows)


@pytest.mark.parametrize("length", [1, 2, 5, 70])
def test_a_prompt_leaves_the_state_of_its_tokens(length):
    world, given = World(), inputs(length, length)
    conv, out = world.prompt(given, 0)
    line = torch.cat([torch.zeros(3, SHAPE.channels), given.conv])
    wanted = functional.conv1d(line.T[None], world.weight[:, None], groups=SHAPE.channels)
    assert torch.allclose(conv, wanted[0].T, atol=1e-5)
    parent = torch.arange(-1, length - 1)[None]
    state = torch.zeros(1, *SHAPE.state)
    query, rows = given.query[None], [x[None] for x in given.rows]
    exact, states = tree_gdn_reference(query, *rows, state, parent)
    assert torch.allclose(out, exact[0], atol=1e-4)
    inputs_kept, kept = world.content(0)
    assert torch.equal(inputs_kept[0], line[-3:]) and torch.equal(kept[0], kept[1])
    assert torch.allclose(kept[0], states[0, -1], atol=1e-4)


def test_a_prompt_in_parts_is_the_prompt():
    whole, parts, given = World(), World(), inputs(9, 1)
    out = whole.prompt(given, 0)
    rows = [parts.prompt(pick(given, [0, 1]), 0), parts.prompt(pick(given, [2]), 0, prefix=2)]
    rows.append(parts.prompt(pick(given, list(range(3, 9))), 0, prefix=3))
    assert_close([torch.cat(x) for x in zip(*rows, strict=True)], out)
    assert_close(parts.content(0), whole.content(0))
    assert parts.pool.lengths == [9]


def test_verification_reads_and_commit_replays_the_path():
    world, plain, given = World(), World(), inputs(len(TREE), 3)
    for each in (world, plain):
        each.prompt(inputs(5, 2), 0)
    before = world.content(0)
    out = world.run(given, tree(0, 5))
    assert all(torch.equal(a, b) for a, b in zip(world.content(0), before, strict=True))
    wanted = plain.prompt(pick(given, PATH), 0, prefix=5)
    assert_close([x[PATH] for x in out], wanted)
    world.pool.commit(0, PATH)
    assert_close(world.content(0), plain.content(0))
    assert world.pool.lengths == [9]


def test_the_next_forward_sees_what_was_committed():
    world, plain = World(), World()
    first, second = inputs(len(TREE), 3), inputs(3, 4)
    world.run(first, tree(0, 0))
    world.pool.commit(0, PATH)
    out = world.run(second, tree(0, 4, [-1, 0, 0]))
    plain.prompt(pick(first, PATH), 0)
    wanted = plain.prompt(pick(second, [0, 2]), 0, prefix=4)
    assert_close([x[[0, 2]] for x in out], wanted)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2)])
def test_sequences_with_different_trees_are_independent(order):
    world, trees = World(), {0: TREE, 1: [-1], 2: [-1, 0, 1]}
    paths = {0: PATH, 1: [0], 2: [0, 1]}
    given = {s: inputs(len(trees[s]), 10 + s) for s in trees}
    prompts = {s: inputs(4 + s, 20 + s) for s in trees}
    for s in trees:
        world.prompt(prompts[s], s)
    before = world.content(1)
    out = world.run(
        together(*(given[s] for s in order)), *(tree(s, 4 + s, trees[s]) for s in order)
    )
    for s in order:
        world.pool.commit(s, paths[s])
    first = 0
    for s in order:
        alone = World()
        alone.prompt(prompts[s], s)
        wanted = alone.run(given[s], tree(s, 4 + s, trees[s]))
        assert_close([x[first : first + len(trees[s])] for x in out], wanted)
        alone.pool.commit(s, paths[s])
        assert_close(world.content(s), alone.content(s))
        first += len(trees[s])
    if 1 not in order:
        assert all(torch.equal(a, b) for a, b in zip(world.content(1), before, strict=True))


def test_a_packed_prompt_of_several_sequences():
    world, given = World(), [inputs(3, 1), inputs(6, 2)]
    world.run(together(*given), chain(1, 0, [0] * 3), chain(0, 0, [0] * 6), is_prompt=True)
    for s, one in zip((1, 0), given, strict=True):
        alone = World()
        alone.prompt(one, s)
        assert_close(world.content(s), alone.content(s))


def test_the_state_depends_on_the_path_alone_bit_for_bit():
    """Trees of other shapes around it, and other places in them, replay the same rows."""
    path, states = inputs(3, 5), []
    for parent, rows in (
        ([-1, 0, 1], [0, 1, 2]),
        ([-1, 0, 0, 0, 3, 2, 2], [0, 2, 5]),
        ([-1, 0, 1, 1, 1, 1, 4, 6, 7, 8, 0, 0], [0, 1, 5]),
    ):
        world = World()
        world.prompt(inputs(7, 6), 0)
        given = inputs(len(parent), 7)
        for part, mine in zip((given.conv, given.query, *given.rows), _tensors(path), strict=True):
            part[rows] = mine
        world.run(given, tree(0, 7, parent))
        world.pool.commit(0, rows)
        states.append(world.content(0))
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


def _tensors(given: Inputs) -> tuple[torch.Tensor | None, ...]:
    return given.conv, given.query, *given.rows


def test_snapshots_stand_at_block_boundaries_and_bring_the_state_back():
    world, given = World(), inputs(300, 8)
    for first in range(0, 300, 150):
        world.prompt(pick(given, list(range(first, first + 150))), 0, prefix=first)
    assert world.pool.resumable(0) == [300, 256, 128, 0]
    world.run(inputs(2, 9), tree(0, 300, [-1, 0]))
    world.pool.commit(0, [0, 1])
    assert world.pool.resumable(0) == [302, 256, 128, 0]
    for length in (256, 128):
        world.pool.restore(0, length)
        fresh = World()
        fresh.prompt(pick(given, list(range(length))), 0)
        assert_close(world.content(0), fresh.content(0))
        assert world.pool.resumable(0)[0] == length
    world.pool.restore(0, 0)
    assert not any(x.any() for x in world.content(0)) and world.pool.resumable(0) == [0]
    assert world.pool.resumable(7) == [0]


def test_a_boundary_at_the_last_row_is_no_use():
    """The last prompt token always runs again, so a snapshot must leave it."""
    world = World()
    world.prompt(inputs(64, 1), 0)
    assert world.pool.resumable(0) == [64, 0]
    world.prompt(inputs(1, 2), 0, prefix=64)
    assert world.pool.resumable(0) == [65, 0]


def test_old_snapshots_make_room():
    world = World()
    world.prompt(inputs(1, 0), 0)
    for first in range(1, 640, 64):
        world.prompt(inputs(64, first), 0, prefix=first)
    assert world.pool.resumable(0) == [641, 640, 576, 512, 448, 0]


def test_a_prompt_that_failed_half_way_is_not_resumed():
    world = World()
    world.prompt(inputs(70, 1), 0)
    step = world.step(chain(0, 70, [0] * 3), is_prompt=True)
    world.pool.begin(step.lineage)
    convolve(world.pool, LAYERS[0], step, inputs(3, 2).conv, world.weight, None)
    assert world.pool.resumable(0) == [64, 0]
    world.pool.restore(0, 64)
    fresh = World()
    fresh.prompt(pick(inputs(70, 1), list(range(64))), 0)
    assert_close(world.content(0), fresh.content(0))


def test_a_verification_that_failed_half_way_changes_nothing():
    world = World()
    world.prompt(inputs(5, 1), 0)
    before = world.content(0)
    step = world.step(tree(0, 5))
    world.pool.begin(step.lineage)
    convolve(world.pool, LAYERS[0], step, inputs(len(TREE), 2).conv, world.weight, None)
    world.run(inputs(1, 3), tree(0, 5, [-1]))
    assert all(torch.equal(a, b) for a, b in zip(world.content(0), before, strict=True))
    assert world.pool.lengths == [5]


def test_a_convolution_alone_needs_no_recurrence():
    world = World(StateShape(channels=6, width=3))
    world.prompt(inputs(4, 1), 0)
    given = inputs(len(TREE), 2)
    world.run(given, tree(0, 4))
    world.pool.commit(0, PATH)
    assert torch.equal(world.content(0)[0][1], given.conv[PATH][-2:])
