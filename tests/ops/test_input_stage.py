"""Catches: a norm applied to the wrong part, an epsilon forgotten, a part's columns multiplied with
another part's weights, widths that are no multiple of a tile, strided parts read as packed ones.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle4.ops import normed_linear
from tests.ops.kernels import CHECKS, DEVICE, assert_as_close, generator


def stage(parts: int, rows: int, width: int, columns: int, has_norm: bool, dtype: torch.dtype):
    """Strided parts of different scale, and modules with gains away from 1."""
    noise = generator(parts + rows + width)
    together = torch.randn(rows, parts, width, generator=noise)
    together *= torch.logspace(-2, 2, parts).unsqueeze(-1)
    norms = [LlamaRMSNorm(width, eps=1e-3) for _ in range(parts if has_norm else 0)]
    linear = nn.Linear(parts * width, columns, bias=False)
    linear.weight.data = torch.randn(columns, parts * width, generator=noise) / width**0.5
    for norm in norms:
        norm.weight.data = 1 + 0.3 * torch.randn(width, generator=noise)
    modules = nn.ModuleList([*norms, linear]).to(dtype).requires_grad_(False)
    return together.to(dtype).unbind(1), list(modules[:-1]), linear


def compute(parts, norms, linear) -> torch.Tensor:
    """Formulas, in float64."""
    found = []
    for i, part in enumerate(parts):
        wide = part.double()
        if norms:
            wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
            wide = wide * norms[i].weight.double()
        found.append(wide)
    return torch.cat(found, dim=-1) @ linear.weight.double().T


CASES = [(3, 5, 48, 40, True), (2, 1, 33, 7, True), (1, 17, 64, 65, True), (4, 2, 20, 16, True)]
CASES += [(3, 3, 24, 10, False), (3, 80, 130, 33, True)]


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_formula(case):
    parts, norms, linear = stage(*case, torch.float32)
    found = normed_linear(parts, norms, linear, "torch")
    torch.testing.assert_close(found.double(), compute(parts, norms, linear), atol=2e-4, rtol=1e-4)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_as_near_to_the_formula(case, dtype):
    parts, norms, linear = stage(*case, dtype)
    reference, exact = normed_linear(parts, norms, linear, "torch"), compute(parts, norms, linear)
    moved = nn.ModuleList([*norms, linear]).to(DEVICE)
    on_device = [part.to(DEVICE) for part in parts]
    found = normed_linear(on_device, list(moved[:-1]), linear, "triton")
    assert found.dtype == dtype
    assert_as_close(found, reference, exact, 4)


def test_other_modules_are_called_as_they_are():
    class Adapted(nn.Linear):
        def forward(self, rows):
            return super().forward(rows) + 1

    parts, norms, linear = stage(2, 3, 8, 5, True, torch.float32)
    adapted = Adapted(16, 5, bias=False)
    adapted.weight = linear.weight
    plain = normed_linear(parts, norms, linear)
    assert torch.equal(normed_linear(parts, norms, adapted), plain + 1)
    with pytest.raises(ValueError, match="cannot hold"):
        normed_linear(parts, norms, adapted, "triton")


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    parts, norms, linear = stage(2, 3, 16, 8, True, torch.float32)
    parts, gains = ([t.to(DEVICE) for t in ts] for ts in (parts, [n.weight.data for n in norms]))
    args = (parts, gains, linear.weight.data.to(DEVICE), 1e-3)
    torch.library.opcheck(torch.ops.eagle4.normed_linear, args, test_utils=CHECKS)
