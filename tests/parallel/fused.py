"""Sums that go on with residual and norm, without GPUs: files for memory that peers read.

The kernel itself runs where Triton interprets it (see `tests/ops/test_sum_add_norm.py`); elsewhere
a stand-in takes its place.
"""

from __future__ import annotations

import logging
import os
import random
import time
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle4.ops import rank_sum, sum_add_norm
from eagle4.ops.rank_sum import MAX_BYTES
from eagle4.ops.sum_add_norm import NUM_PROGRAMS, Peers, _memory, _peers, open_memory, share_memory
from eagle4.ops.triton import sum_add_norm as kernels
from eagle4.parallel import Ranks
from eagle4.parallel.sums import choose_fused, choose_sum
from tests.ops.kernels import rounding_to_nearest
from tests.parallel import cases, one_shot

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Handle(NamedTuple):
    """What the stand-in for PyTorch's rendezvous returns."""

    buffer_ptrs: list[int]
    rank: int
    memories: list[torch.Tensor]  # keeps them mapped


def install(ranks: Ranks, folder: str, fails_at: str = "", error: str = "") -> list[str]:
    """Processes that read each other's memory, and kernels; rank 1 fails at one of the steps."""
    calls: list[str] = []
    handles: list[Handle] = []

    def breaks(step: str) -> None:
        calls.append(step)
        if step == fails_at and ranks.rank == 1:
            raise RuntimeError(error)

    def place(rank: int, size: int) -> torch.Tensor:
        path = f"{folder}/{rank}-{size}"
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        breaks("allocate")
        return place(ranks.rank, size).fill_(255)

    def rendezvous(own: torch.Tensor, group: str) -> Handle:
        dist.barrier()
        breaks("rendezvous")
        memories = [place(rank, len(own)) for rank in range(ranks.size)]
        memories[ranks.rank] = own
        handles.append(Handle([m.data_ptr() for m in memories], ranks.rank, memories))
        return handles[-1]

    def kernel(part, residual, gain, eps, peers: Peers):
        breaks("kernel")
        assert len(peers.address_W) == ranks.size and peers.rank == ranks.rank
        found = [torch.empty_like(part) for _ in range(ranks.size)]
        dist.all_gather(found, part.contiguous(), group=ranks.group)
        hidden = residual + torch.stack(found).float().sum(0).to(part.dtype)
        normed = torch.nn.functional.rms_norm(hidden, (part.shape[-1],), gain, eps)
        return hidden, normed + (fails_at == "norm" and ranks.rank == 1)

    mock.patch.object(_symmetric_memory, "empty", empty).start()
    mock.patch.object(_symmetric_memory, "rendezvous", rendezvous).start()
    if IS_INTERPRETED:
        be_late(ranks)
    else:
        mock.patch.object(kernels, "compile_kernel", lambda *_: breaks("compile")).start()
        mock.patch.object(kernels, "sum_add_norm", kernel).start()
    return calls


def be_late(ranks: Ranks) -> None:
    """Kernels of this rank stop every now and then where they meet the others."""
    from triton.runtime.interpreter import InterpreterBuilder

    late = random.Random(ranks.rank)
    atomic = InterpreterBuilder.create_atomic_rmw

    def interrupted(*args: Any) -> Any:
        found = atomic(*args)
        time.sleep(0.005 if late.random() < 0.2 else 0.0001)
        return found

    mock.patch.object(InterpreterBuilder, "create_atomic_rmw", interrupted).start()


def all_fused(ranks: Ranks, folder: str, fails_at: str = "", error: str = "") -> list[str]:
    """Let the ranks choose where everything but one step works."""
    one_shot.install(ranks)
    ranks.sum_impl = choose_sum(ranks, "cpu")
    calls = install(ranks, folder, fails_at, error)
    silent = fails_at == "asking" and ranks.rank == 1
    with mock.patch("eagle4.parallel.sums.has_kernels", lambda device: not silent):
        ranks.is_fused = choose_fused(ranks)
    return calls


def choice(ranks: Ranks, folder: str, fails_at: str) -> dict[str, Any]:
    """What the ranks agree on when rank 1 fails at a step, and what they did until then."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("eagle4").addHandler(handler)
    calls = all_fused(ranks, folder, fails_at, f"no {fails_at} here")
    steps = list(dict.fromkeys(calls))
    found = {"fused": ranks.is_fused, "sums": ranks.sums, "steps": steps, "logged": logged}
    hidden, _ = ranks.sum_add_norm(torch.ones(1, 4), torch.ones(1, 4), LlamaRMSNorm(4), "layers")
    found |= {"hidden": hidden.tolist(), "bytes": ranks.sent_bytes["layers"]}
    found["memory"] = len(_memory), len(_peers)
    with mock.patch.object(dist, "destroy_process_group"):
        ranks.leave()
    return {**found, "memory after leaving": (len(_memory), len(_peers))}


@torch.no_grad()
def graphs(ranks: Ranks, folder: str) -> int:
    """How many graphs a compiled block takes for parts of all sizes."""
    all_fused(ranks, folder)
    assert ranks.is_fused
    norm, seen = LlamaRMSNorm(8), []

    def block(rows: torch.Tensor) -> torch.Tensor:
        hidden, normed = sum_add_norm(rows * 2, rows, norm, ranks.name, "triton")
        return hidden + normed

    def count(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    compiled = torch.compile(block, backend=count, fullgraph=True, dynamic=True)
    for rows in (2, 3, 64, MAX_BYTES // 8):  # the last one is too large for the kernel
        found = compiled(torch.ones(rows, 8))
        torch.testing.assert_close(found, torch.full((rows, 8), 2.0 + 2 * ranks.size))
    args = (torch.ones(3, 8), torch.ones(3, 8), norm.weight.detach(), 1e-6, ranks.name)
    torch.library.opcheck(torch.ops.eagle4.sum_add_norm, args, test_utils=("test_faketensor",))
    return len(seen)


def generation(ranks: Ranks | None, folder: str) -> dict[str, Any]:
    """Ids of a pair, fused or not, what the report says, and how often the drafter's block ran."""
    if ranks is None:
        model, calls = cases.build("llama"), []
    else:
        calls = all_fused(ranks, folder)
        model = cases.shared(cases.build("llama"), ranks)
    calls.clear()
    blocks: list[int] = []
    assert model.drafter is not None
    model.drafter.layers[0].register_forward_pre_hook(lambda *_: blocks.append(1))
    found = {}
    for is_fused in (True, False):
        if ranks is not None:
            ranks.is_fused = is_fused
        out = cases.answer(model, 4, cases.speculation(model, "tree"), do_sample=False)
        report = out.speculation.exchange
        found[is_fused] = {
            "ids": out.sequences.tolist(),
            "sums": report and report["sums"],
            "bytes": report and report["bytes"],
            "blocks": len(blocks),
            "kernels": len(calls),
        }
        blocks.clear()
        calls.clear()
    return found


def meetings(ranks: Ranks, folder: str, launches: int) -> list[str]:
    """Launches of real kernels whose ranks are late by turns; which of their results are wrong."""
    install(ranks, folder)
    open_memory(ranks.name, ranks.size, ranks.device)
    share_memory(ranks.name)
    wrong, source = [], random.Random(0)
    with rounding_to_nearest():
        for launch in range(launches):
            width, rows = source.choice([24, 40, 576]), source.choice([1, 2, 3])
            rows += NUM_PROGRAMS * (launch == launches // 2)
            dtype = source.choice([torch.float32, torch.bfloat16])
            noise = torch.Generator().manual_seed(launch)
            shape = (ranks.size + 1, rows, width)
            *parts, residual = torch.randn(shape, generator=noise).to(dtype)
            norm = LlamaRMSNorm(width).to(dtype)
            args = (residual, norm, ranks.name, "triton")
            with torch.no_grad():
                hidden, normed = sum_add_norm(parts[ranks.rank], *args)
                total = torch.zeros(rows, width)
                for part in parts:
                    total += part.float()
                wanted = residual + total.to(dtype)
            near = torch.allclose(normed.float(), norm(wanted).float(), rtol=2e-2, atol=1e-5)
            if not (torch.equal(hidden, wanted) and near):
                wrong.append(f"launch {launch}: {rows} x {width} {dtype}")
    return wrong


def reference(ranks: Ranks) -> bool:
    """Whether the reference is what a block did without the operator, bit for bit."""
    is_same = True
    for dtype in (torch.float32, torch.bfloat16):
        noise = torch.Generator().manual_seed(ranks.rank)
        part = torch.randn(5, 48, generator=noise).to(dtype)
        residual, norm = torch.linspace(-3, 3, 240).view(5, 48).to(dtype), LlamaRMSNorm(48)
        norm.weight.data = torch.linspace(0.5, 1.5, 48)
        norm.to(dtype)
        hidden, normed = sum_add_norm(part, residual, norm, ranks.name)
        wanted = residual + rank_sum(part, ranks.name)
        is_same &= torch.equal(hidden, wanted) and torch.equal(normed, norm(wanted))
    return is_same
