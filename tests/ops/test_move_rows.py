"""Catches: a row read after it was overwritten, words of a row left behind, layers of different
shapes or dtypes mixed up, padding that moves something.
"""

from __future__ import annotations

import random

import pytest
import torch

from eagle4.ops import move_rows, row_addresses
from tests.ops.kernels import DEVICE, generator

SLOTS = 70


def pools(seed: int) -> list[torch.Tensor]:
    """Layers as families have them: other widths, other head counts, other dtypes."""
    noise = generator(seed)
    shapes = [(2, 8), (1, 6), (3, 128), (1, 2)]
    found = [torch.randn(SLOTS, *shape, generator=noise) for shape in shapes]
    return [*found, *(tensor.to(torch.bfloat16) for tensor in found)]


MOVES = {
    "nothing to do": ([4], [4]),
    "an accepted path": ([3, 4, 6, 9], [3, 4, 5, 6]),
    "overlap downwards": ([5, 6, 7, 8], [4, 5, 6, 7]),
    "overlap upwards": ([4, 5, 6, 7], [5, 6, 7, 8]),
    "a swap and padding": ([9, 3, 20, 21], [3, 9, 20, 21]),
    "as many as fit": (list(range(5, 69)), list(range(64))),
}


def check(source: list[int], target: list[int], impl: str, seed: int = 0) -> None:
    before = pools(seed)
    after = [pool.clone().to(DEVICE) for pool in before]
    move_rows(after, *(torch.tensor(side, device=DEVICE) for side in (source, target)), impl=impl)
    for old, new in zip(before, after, strict=True):
        wanted = old.clone()
        for read, write in zip(source, target, strict=True):
            wanted[write] = old[read]
        assert torch.equal(new.cpu(), wanted)


@pytest.mark.parametrize("name", list(MOVES))
def test_the_reference_reads_before_it_writes(name):
    check(*MOVES[name], "torch")


@pytest.mark.kernels
@pytest.mark.parametrize("name", list(MOVES))
def test_the_kernel_moves_the_same(name):
    check(*MOVES[name], "triton")


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_on_random_moves(seed):
    source = random.Random(seed)
    count = source.randint(1, 33)
    check(*(source.sample(range(SLOTS), count) for _ in range(2)), "triton", seed)


def test_nothing_at_all_is_fine():
    none = torch.zeros(0, dtype=torch.int64)
    move_rows([], torch.tensor([1]), torch.tensor([0]))
    move_rows(pools(0), none, none)


def test_rows_that_are_no_whole_words_keep_the_reference():
    odd = torch.arange(12, dtype=torch.bfloat16).view(4, 1, 3)
    pair = torch.tensor([2]), torch.tensor([0])
    with pytest.raises(ValueError, match="cannot hold"):
        move_rows([odd], *pair, impl="triton")
    move_rows([odd], *pair)
    assert odd[0].flatten().tolist() == [6, 7, 8]


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    layers = [pool.to(DEVICE) for pool in pools(0)]
    source, target = (torch.tensor([i, i + 1], device=DEVICE) for i in (3, 1))
    args = (layers, row_addresses(layers), source, target)
    # Its copies of the pools have other addresses than the table: only the declaration is checked.
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.eagle4.move_rows, args, test_utils=utils)
