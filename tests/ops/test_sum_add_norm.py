"""Catches: a part that is read before it is there or after it was overwritten, a rank's part left
out, rounding that differs from the reference's, columns of other rows in a norm, sizes that the
kernel cannot hold, a norm that is not Llama's.
"""

from __future__ import annotations

import importlib
import os
from typing import NamedTuple

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle4.ops import sum_add_norm
from eagle4.ops.rank_sum import MAX_BYTES
from eagle4.ops.sum_add_norm import (
    MOST_ROW_BYTES,
    NUM_PROGRAMS,
    REGION_BYTES,
    Peers,
    fits,
    memory_bytes,
)
from tests.ops.kernels import DEVICE, assert_as_close, generator, rounding_to_nearest
from tests.parallel import fused
from tests.parallel.world import run_world

OPERATOR = importlib.import_module("eagle4.ops.sum_add_norm")  # `ops` shows the function
EPS = 1e-3
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


class Inputs(NamedTuple):
    parts: list[torch.Tensor]  # of every rank
    residual: torch.Tensor
    norm: LlamaRMSNorm

    def hidden(self) -> torch.Tensor:
        """Parts are added in rank order in float32, and rounded once."""
        total = torch.zeros_like(self.residual, dtype=torch.float32)
        for part in self.parts:
            total += part.float()
        return self.residual + total.to(self.residual.dtype)

    def exact(self) -> torch.Tensor:
        """The norm's formula in float64, of the rounded sum."""
        wide = self.hidden().double()
        return self.norm.weight.double() * wide / (wide.pow(2).mean(-1, True) + EPS).sqrt()


def inputs(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> Inputs:
    """Parts of different scale and a gain away from 1."""
    noise = generator(world + sum(shape))
    parts = torch.randn(world, *shape, generator=noise)
    parts *= torch.logspace(-1, 1, world).view(-1, *[1] * len(shape))
    norm = LlamaRMSNorm(shape[-1], EPS).requires_grad_(False)
    norm.weight.data = 1 + 0.3 * torch.randn(shape[-1], generator=noise)
    residual = torch.randn(shape, generator=noise)
    return Inputs(list(parts.to(dtype)), residual.to(dtype), norm.to(dtype))


def peers_of(rank: int, memories: list[torch.Tensor]) -> Peers:
    addresses = [memory.data_ptr() for memory in memories]
    return Peers(memories[rank], torch.tensor(addresses, device=DEVICE), rank)


def ready_of(memory: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches in which every rank was ready ``[NUM_PROGRAMS, W]``, and own launches."""
    words = memory[2 * NUM_PROGRAMS * REGION_BYTES :].view(torch.int32)
    ready, launches = words.split([NUM_PROGRAMS * world, NUM_PROGRAMS])
    return ready.view(NUM_PROGRAMS, world), launches


def as_rank(rank: int, case: Inputs, launch: int) -> tuple[torch.Tensor, torch.Tensor, list]:
    """One rank's launch while the others, who do not run, have published and are ready."""
    from eagle4.ops.triton.sum_add_norm import sum_add_norm as kernel

    world, width = len(case.parts), case.residual.shape[-1]
    size = memory_bytes(world)
    memories = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for _ in case.parts]
    for peer, memory in enumerate(memories):
        ready, launches = ready_of(memory, world)
        ready.fill_(launch)
        ready[:, rank] = launch - 1
        launches.fill_(launch - 1)
        if peer == rank:
            continue
        places = memory[: 2 * NUM_PROGRAMS * REGION_BYTES].view(NUM_PROGRAMS, 2, REGION_BYTES)
        for row, content in enumerate(case.parts[peer].reshape(-1, width)):
            place = places[row % NUM_PROGRAMS, launch % 2].view(content.dtype)
            start = row // NUM_PROGRAMS * width
            place[start : start + width] = content
    moved = [t.to(DEVICE) for t in (case.parts[rank], case.residual, case.norm.weight)]
    with rounding_to_nearest():
        hidden, normed = kernel(*moved, EPS, peers_of(rank, memories))
    return hidden.cpu(), normed.cpu(), [ready_of(memory.cpu(), world) for memory in memories]


SHAPES = [(1, 576), (3, 576), (2, 3, 40), (2, 4096)]
CASES = [(shape, world) for shape in SHAPES for world in (2, 3, 4)] + [((NUM_PROGRAMS + 1, 24), 2)]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "world"), CASES)
def test_the_kernel_adds_all_parts_and_norms_the_sum(shape, world, dtype):
    case = inputs(world, shape, dtype)
    wanted = case.norm(case.hidden())
    for rank in range(world):
        launch = 7 + rank  # both places of a part
        hidden, normed, after = as_rank(rank, case, launch)
        assert torch.equal(hidden, case.hidden()), "bits are the same on all ranks"
        assert_as_close(normed, wanted, case.exact())
        used = min(case.residual.numel() // shape[-1], NUM_PROGRAMS)
        for peer, (ready, launches) in enumerate(after):
            assert (ready[:used] == launch).all(), "everybody is told"
            assert (ready[used:, rank] == launch - 1).all(), "other programs did not run"
            own = [launch] * used if peer == rank else [launch - 1] * used
            assert launches[:used].tolist() == own


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_round_as_the_reference_does(dtype):
    """Of two parts the rounded float32 sum is the sum that a backend forms."""
    case = inputs(2, (4, 576), dtype)
    hidden, _, _ = as_rank(1, case, 3)
    assert torch.equal(hidden, case.residual + (case.parts[0] + case.parts[1]))


@pytest.mark.slow
@pytest.mark.kernels
@needs_interpreter
def test_a_split_drafter_drafts_the_same_through_the_kernel(tmp_path):
    alone = fused.generation(None, "")
    for found in run_world(2, fused.generation, str(tmp_path)):
        assert found[True]["ids"] == alone[True]["ids"]
        assert found[True]["sums"] == "one-shot, fused with norms"


@pytest.mark.kernels
@needs_interpreter
def test_processes_meet_in_every_launch_however_late_they_are(tmp_path):
    for wrong in run_world(3, fused.meetings, str(tmp_path), 12):
        assert not wrong


def test_the_reference_is_what_a_block_did_before():
    assert all(run_world(2, fused.reference))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain_dtype", [None, torch.float32])
def test_large_parts_are_summed_otherwise_with_the_bits_of_the_reference(
    dtype, gain_dtype, monkeypatch
):
    case = inputs(2, (300, 576), dtype)
    case.norm.to(gain_dtype or dtype)
    asked = []

    def add(part: torch.Tensor, group_name: str, impl: str = "torch") -> torch.Tensor:
        asked.append((group_name, impl))
        return part + case.parts[1]

    monkeypatch.setattr(OPERATOR, "rank_sum", add)
    args = (case.parts[0], case.residual, case.norm, "some group")
    wanted, found = sum_add_norm(*args), sum_add_norm(*args, "triton")
    assert asked == [("some group", "torch"), ("some group", "one_shot")]
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    inside = (case.parts[0], case.residual, case.norm.weight, EPS, "some group")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.eagle4.sum_add_norm, inside, test_utils=checks)


def test_what_the_kernel_takes():
    def asked(rows: int, width: int, dtype=torch.bfloat16, gain=None, other=None) -> bool:
        part = torch.empty(rows, width, dtype=dtype, device="meta")
        residual = torch.empty(other or (rows, width), dtype=dtype, device="meta")
        return fits(part, residual, torch.empty(width, dtype=gain or dtype, device="meta"))

    most = MOST_ROW_BYTES // 2
    assert asked(1, 576) and asked(16, 4096) and asked(4, most) and asked(50, 576, torch.float32)
    assert not asked(17, 4096) and not asked(1, 2 * most) and not asked(0, 576)
    assert not asked(1, 576, torch.float16) and not asked(1, 576, gain=torch.float32)
    assert not asked(1, 576, other=(2, 576))
    # Whatever fits, all rows of one program fit into its region.
    for row_bytes in (4, 48, 1152, 8192, MOST_ROW_BYTES):
        rows = MAX_BYTES // row_bytes
        assert -(-rows // NUM_PROGRAMS) * row_bytes <= REGION_BYTES


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="pass one of torch, one_shot, triton"):
        sum_add_norm(torch.ones(1, 2), torch.ones(1, 2), LlamaRMSNorm(2), "group", "nvls")
