"""Catches: blocks that run together and are not what they are one by one: other results, a hook
that is not called or whose result is lost, arguments of a neighbour, blocks that are left out.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import zoo
from scripted import small_drafter
from tiny import tiny_llama

from eagle4.engine.reference import prefill
from eagle4.engine.state import State
from eagle4.target import TargetAdapter, blocks

IDS = torch.tensor([[4, 9, 33, 17, 60, 5]])


class Counting:
    """`run_blocks`, and how many blocks every call of it ran."""

    def __init__(self):
        self.sizes: list[int] = []

    def __call__(self, members, steps, args, kwargs):
        self.sizes.append(len(members))
        return blocks.run_blocks(members, steps, args, kwargs)


def logits(target, run) -> list[torch.Tensor]:
    """Of a first forward, which finds out widths, and of a second one over the same rows."""
    adapter = TargetAdapter(target)
    state, found = State(IDS, [0], 0), []
    with torch.no_grad(), adapter.attached(run_blocks=run):
        for _ in range(2):
            state.sequences[0].kv_length = 0
            found.append(prefill(state, state.sequences[0], adapter, False)[0])
    return found


@pytest.mark.parametrize(("layers", "sizes"), [(4, [4]), (6, [3, 3]), (10, [2] * 5), (7, [1] * 7)])
def test_blocks_in_a_row_run_together(layers, sizes):
    target, run = tiny_llama(layers=layers), Counting()
    expected = logits(target, None)
    found = logits(target, run)
    assert run.sizes == sizes
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_hook_between_blocks_counts():
    """What it makes of an output is the next block's input, so they run one by one."""
    target, run, seen = tiny_llama(layers=4), Counting(), []

    def double(module, args, output):
        seen.append(1)
        return 2 * output

    target.model.layers[1].register_forward_hook(double)
    expected = logits(target, None)
    found = logits(target, run)
    assert run.sizes == [1] * 4 and len(seen) == 4
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[1], logits(tiny_llama(layers=4), None)[1])


def test_a_hook_that_comes_later_counts():
    """The first forward gave no sign of it; what ran ahead of it runs again."""
    target, run = tiny_llama(layers=4), Counting()
    calls = []

    def double_later(module, args, output):
        calls.append(1)
        return 2 * output if len(calls) > 1 else None

    def found(run) -> torch.Tensor:
        calls.clear()
        return logits(target, run)[1]

    target.model.layers[1].register_forward_hook(double_later)
    assert torch.equal(found(None), found(run))
    assert run.sizes == [4, 1, 1]


def test_a_hook_that_changes_an_output_in_place_counts():
    """As steering does; the object is the same, what it holds is not."""
    for late in (False, True):
        target, run, calls = tiny_llama(layers=4), Counting(), []

        def steer(module, args, output, calls=calls, late=late):
            calls.append(1)
            if len(calls) > late:
                output.add_(1.0)

        target.model.layers[1].register_forward_hook(steer)
        expected = logits(target, None)
        calls.clear()
        found = logits(target, run)
        assert all(map(torch.equal, found, expected))
        assert run.sizes == ([4, 1, 1] if late else [1] * 4)


def test_nothing_of_a_forward_is_kept():
    target, seen = tiny_llama(layers=4), []
    target.model.layers[2].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    adapter, state = TargetAdapter(target), State(IDS, [0], 0)
    with torch.no_grad(), adapter.attached(run_blocks=blocks.run_blocks):
        for _ in range(2):
            state.sequences[0].kv_length = 0
            prefill(state, state.sequences[0], adapter, False)
        gc.collect()
        assert [ref() for ref in seen] == [None, None]


def test_a_neighbour_with_other_arguments_runs_alone():
    """Gemma 3 hands other rotations to its global layers than to its local ones."""
    kinds = ["sliding_attention", "full_attention"] * 2
    kinds += ["full_attention"] * 5 + ["sliding_attention"]  # two groups: one would go together
    target, run = zoo.build("gemma3", num_hidden_layers=10, layer_types=kinds), Counting()
    expected = logits(target, None)
    found = logits(target, run)
    assert run.sizes == [1] * 10, "groups of one model and single blocks are graphs too many"
    assert torch.equal(found[1], expected[1])


def test_taps_of_blocks_that_run_together_are_those_of_single_ones():
    target = tiny_llama(layers=4)
    taps = small_drafter(target).config.tap_layers
    adapter, found = TargetAdapter(target, taps), []
    for run in (None, Counting()):
        state = State(IDS, [0], 0)
        with torch.no_grad(), adapter.attached(run_blocks=run):
            for _ in range(2):
                state.sequences[0].kv_length = 0
                state.sequences[0].forget()
                prefill(state, state.sequences[0], adapter, False)
        found.append(torch.cat(state.sequences[0].pending))
    assert torch.equal(*found)
