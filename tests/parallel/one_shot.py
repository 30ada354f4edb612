"""One-shot sums without GPUs: a stand-in for PyTorch's kernel, and what the ranks do with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from eagle4.ops.rank_sum import MAX_BYTES, _scratch, rank_sum
from eagle4.parallel import Ranks
from eagle4.parallel.sums import choose_sum
from tests.parallel import cases

_library = torch.library.Library("symm_mem", "IMPL")


class Memory(NamedTuple):
    """What the stand-in was asked for on this rank."""

    calls: list[str]
    breaks: Callable[[str], None]  # raises where a step has to fail


def install(ranks: Ranks, fails_at: str = "", error: str = "") -> Memory:
    """Make CPUs look as if their peers read their memory; rank 1 fails at one of the steps."""
    calls: list[str] = []

    def breaks(step: str) -> None:
        calls.append(step)
        if step == fails_at and ranks.rank == 1:
            raise RuntimeError(error)

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        breaks("allocate")
        return torch.full((size,), 255, dtype=dtype)  # NaN as floats

    def rendezvous(tensor: torch.Tensor, group: str) -> None:
        breaks("rendezvous")

    def kernel(place: torch.Tensor, part: torch.Tensor, op: str, name: str) -> torch.Tensor:
        """Takes what PyTorch's kernel takes, and sums in rank order as that does."""
        calls.append("kernel")
        assert place.untyped_storage().data_ptr() == _scratch[name].data_ptr()
        assert place.storage_offset() == part.storage_offset() == 0
        assert place.is_contiguous() and part.is_contiguous() and place.shape == part.shape
        assert place.dtype == part.dtype and part.dtype in (torch.float32, torch.bfloat16)
        assert op == "sum" and part.numel() * part.element_size() % 4 == 0
        place.copy_(part)
        found = [torch.empty_like(place) for _ in range(ranks.size)]
        dist.all_gather(found, place, group=ranks.group)
        total = found[0]
        for other in found[1:]:
            total = total + other
        return total + (fails_at == "sum" and ranks.rank == 1)

    mock.patch.object(_symmetric_memory, "empty", empty).start()
    mock.patch.object(_symmetric_memory, "rendezvous", rendezvous).start()
    _library.impl("one_shot_all_reduce_copy", kernel, "CPU")
    return Memory(calls, breaks)


def parts(rank: int) -> dict[str, torch.Tensor]:
    """What a layer may want to add up, and what it should not."""
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(64, 48, generator=generator)
    most = MAX_BYTES // 4
    return {
        "rows": whole[:3].clone(),
        "bf16": whole.bfloat16(),
        "view with an offset": whole[5:9],
        "columns": whole[:, 3:7],
        "transposed": whole.t(),
        "as large as possible": torch.randn(most, generator=generator),
        "too large": torch.randn(most + 1, generator=generator),
        "odd bf16": whole.flatten()[:7].bfloat16(),
        "fp16": whole[:4].half(),
        "fp64": whole[:4].double(),
        "nothing": whole[:0].clone(),
    }


def sums(ranks: Ranks) -> dict[str, Any]:
    """Which parts go through the kernel, and which sums are wrong."""
    calls = install(ranks).calls
    assert choose_sum(ranks, "cpu") == "one_shot"
    found: dict[str, Any] = {"by kernel": [], "wrong": []}
    for name, part in parts(ranks.rank).items():
        before, kept = calls.count("kernel"), part.clone()
        total = rank_sum(part, ranks.name, "one_shot")
        if calls.count("kernel") > before:
            found["by kernel"].append(name)
        wanted = torch.stack([parts(rank)[name].double() for rank in range(ranks.size)]).sum(0)
        close = torch.allclose(total.double(), wanted, rtol=1e-2, atol=2e-2)
        fits = total.shape == part.shape and total.dtype == part.dtype and total.is_contiguous()
        if not (close and fits and torch.equal(part, kept)):
            found["wrong"].append(name)
    return found


def graphs(ranks: Ranks) -> int:
    """How many graphs a compiled layer takes for parts of all sizes."""
    install(ranks)
    assert choose_sum(ranks, "cpu") == "one_shot"
    seen = []

    def layer(rows: torch.Tensor) -> torch.Tensor:
        return rank_sum(rows * 2, ranks.name, "one_shot") + 1

    def count(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for rows in (2, 3, 64, MAX_BYTES // 4):  # the last one is too large for the kernel
        part = torch.ones(rows, 5) * (ranks.rank + 1)
        total = ranks.size * (ranks.size + 1) // 2
        assert torch.equal(compiled(part), torch.full((rows, 5), 2.0 * total + 1))
    args = (torch.ones(3, 4), ranks.name)
    torch.library.opcheck(torch.ops.eagle4.one_shot_sum, args, test_utils=("test_faketensor",))
    return len(seen)


def choice(ranks: Ranks, fails_at: str) -> dict[str, Any]:
    """What the ranks agree on when rank 1 fails at a step, and what they did until then."""
    calls, breaks = install(ranks, fails_at, f"no {fails_at} here")
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("eagle4").addHandler(handler)
    with mock.patch("eagle4.parallel.sums.check_place", lambda *_: breaks("place")):
        ranks.sum_impl = choose_sum(ranks, "cpu")
    steps = list(dict.fromkeys(calls))
    found = {"impl": ranks.sum_impl, "sums": ranks.sums, "steps": steps, "logged": logged}
    found["scratch"] = len(_scratch)
    found["total"] = ranks.all_reduce(torch.ones(2), "layers").tolist()
    with mock.patch.object(dist, "destroy_process_group"):
        ranks.leave()
    return {**found, "scratch after leaving": len(_scratch)}


def generation(ranks: Ranks | None) -> dict[str, Any]:
    """Ids with one-shot sums, and what the report says."""
    if ranks is not None:
        calls = install(ranks).calls
        ranks.sum_impl = choose_sum(ranks, "cpu")
        before = len(calls)
    model = cases.shared(cases.build("llama"), ranks)
    out = cases.answer(model, 4, cases.speculation(model, "tree"), do_sample=False)
    report = out.speculation.exchange
    found = {"ids": out.sequences.tolist(), "sums": report and report["sums"]}
    return {**found, "kernels": 0 if ranks is None else len(calls) - before}
