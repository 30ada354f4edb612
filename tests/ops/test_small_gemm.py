"""Catches: a tile beyond the edge, a bias forgotten, the first tile (read early) counted twice,
adapters and hooks that a kernel would pass by.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle4.ops import small_linear
from tests.ops.kernels import CHECKS, DEVICE, assert_as_close, generator


def make(rows: tuple[int, ...], width: int, columns: int, bias: bool, dtype: torch.dtype):
    noise = generator(width + columns)
    linear = nn.Linear(width, columns, bias=bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=noise) / width**0.5
    return torch.randn(*rows, width, generator=noise).to(dtype), linear.to(dtype).requires_grad_(
        False
    )


CASES = [((1,), 1, 1, False), ((3,), 40, 33, True), ((2, 8), 128, 64, False), ((64,), 300, 5, True)]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_multiplies(case, dtype):
    rows, linear = make(*case, dtype)
    reference = small_linear(rows, linear, "torch")
    assert torch.equal(reference, linear(rows))
    exact = rows.double() @ linear.weight.double().T
    exact = exact if linear.bias is None else exact + linear.bias.double()
    found = small_linear(rows.to(DEVICE), linear.to(DEVICE), "triton")
    assert found.shape == reference.shape and found.dtype == dtype
    assert_as_close(found, reference, exact, 4)


def test_what_is_no_stock_linear_is_called():
    rows, linear = make((3,), 8, 4, True, torch.float32)
    plain = linear(rows)
    linear.register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(small_linear(rows, linear), plain + 1)
    with pytest.raises(ValueError, match="cannot hold"):
        small_linear(rows, linear, "triton")


def test_gradients_and_many_rows_stay_with_the_reference():
    rows, linear = make((65,), 8, 4, False, torch.float32)
    small_linear(rows.requires_grad_(), linear).sum().backward()
    assert rows.grad is not None
    with pytest.raises(ValueError, match="cannot hold"):
        small_linear(rows, linear, "triton")
    with pytest.raises(ValueError, match="'cutlass'.*auto, torch, triton"):
        small_linear(rows, linear, "cutlass")


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    rows, linear = make((3,), 40, 33, True, torch.float32)
    args = (rows.to(DEVICE), linear.weight.data.to(DEVICE), linear.bias.data.to(DEVICE))
    torch.library.opcheck(torch.ops.eagle4.small_linear, args, test_utils=CHECKS)
    torch.library.opcheck(torch.ops.eagle4.small_linear, (*args[:2], None), test_utils=CHECKS)
