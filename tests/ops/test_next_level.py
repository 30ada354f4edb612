"""Catches: kernels that decide differently from the torch reference in one bit: ties, padding,
free or worthless nodes, counts at the limit.
"""

from __future__ import annotations

import random

import pytest
import torch

from eagle4.harness import device_policy
from eagle4.ops.next_level import MOST_BLOCK, best_worth, choose_nodes
from tests.harness.states import Shape, random_book, random_states
from tests.ops.kernels import CHECKS, DEVICE


def compare(num_shapes: int, per_shape: int, seed: int, device: str = "cpu") -> int:
    """Compare ``impl="triton"`` with torch; returns the number of rounds."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(num_shapes):
        shape, book = Shape(rng), device_policy.device_book(random_book(rng), device)
        pool, frontier, probs, prices = (
            part.to(device)
            if isinstance(part, torch.Tensor)
            else type(part)(*(tensor.to(device) for tensor in part))
            for part in random_states(generator, shape, per_shape)
        )
        results = []
        for impl in ("torch", "triton"):
            level = device_policy.next_level(
                *(pool, frontier, probs, *shape.depths(device), shape.min_width),
                *(shape.top_k, shape.max_nodes, book, prices),
                impl=impl,
            )
            chosen = device_policy.choose(pool, shape.max_nodes, prices, impl=impl)
            results.append((*level, chosen))
        for reference, kernel in zip(*results, strict=True):
            assert torch.equal(reference, kernel)
    return num_shapes * per_shape


def test_worth_and_choice_by_hand():
    half = 1 << 29
    survival = torch.tensor([[[half, half // 2, 0], [half, 1, 0]]])
    token, verify = torch.tensor([100]), torch.tensor([[0, 10, 20, 60, 100]])
    assert best_worth(survival.flatten(1)[:, None], token, verify)[:, 0].tolist() == [80]
    chosen = choose_nodes(survival, token, verify, 2)
    assert chosen.tolist() == [[[True, False, False], [True, False, False]]]
    assert choose_nodes(survival, token, verify + torch.arange(5) * 99, 2).sum() == 0


@pytest.mark.kernels
def test_the_kernels_agree():
    assert compare(4, 2, 0, DEVICE.type) == 8


@pytest.mark.kernels
@pytest.mark.slow
def test_the_kernels_agree_on_many_states():
    assert compare(60, 8, 1, DEVICE.type) == 480


@pytest.mark.kernels
def test_the_operators_are_well_declared():
    wide = torch.tensor([[5 << 20, 3 << 20, 0]], device=DEVICE)
    one, costs = torch.tensor([100], device=DEVICE), torch.tensor([[0, 3, 5, 9]], device=DEVICE)
    code = torch.tensor([-1, 0, 0], dtype=torch.int32, device=DEVICE)
    ops = torch.ops.eagle4
    checks = {"test_utils": CHECKS}
    opcheck = torch.library.opcheck
    opcheck(ops.best_offer, (wide, code, one, costs, costs, 1, 2, 2, 4), **checks)
    opcheck(ops.choose_nodes, (wide[None], one, costs, 2), **checks)


def test_a_batch_that_no_program_holds_is_refused():
    many = torch.zeros(1, 2, MOST_BLOCK, dtype=torch.int64)
    with pytest.raises(ValueError, match="cannot hold"):
        choose_nodes(many, torch.ones(1).long(), torch.zeros(1, 3).long(), 4, impl="triton")


@pytest.mark.cuda
def test_the_kernels_agree_on_the_device():
    assert compare(200, 64, 1, "cuda") == 12_800
