"""`Ranks`: the processes that share one model, and the few collectives that they exchange.

Functional collectives (`torch.ops._c10d_functional`): gloo on CPUs, NCCL on CUDA, traceable by
`torch.compile`; sums may go through symmetric memory (see `sums`). Every call says what it is for,
and the bytes that this rank contributes are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401  (registers the operators)
from torch import nn

from ..ops.rank_sum import close_scratch, rank_sum
from ..ops.sum_add_norm import close_memory, sum_add_norm

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank died, fell silent or left; this one cannot go on."""


class Ranks:
    """One tensor-parallel group, seen from one of its members.

    ``rank`` of ``size``; ``device`` is where this rank's share lives; ``sum_impl`` is how sums are
    formed ("torch" or "one_shot"), ``is_fused`` whether the residual and the norm behind a sum are
    part of it where they can be; both are the same on all ranks. ``sent_bytes`` counts what the
    rank contributed to collectives, by purpose: ``layers`` (sums inside the models), ``draft``,
    ``verify``, ``rows`` (whole rows of logits) and ``agree``. What compiled graphs exchange is not
    counted.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str = "cpu"):
        self.group: dist.ProcessGroup | None = group
        self.name: str = group.group_name
        self.backend: str = dist.get_backend(group)
        self.sum_impl = "torch"
        self.is_fused = False
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device)
        self.sent_bytes: Counter[str] = Counter()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def sums(self) -> str:
        """What adds up, in words: ``"one-shot"`` (small parts), or the backend that always does."""
        if self.is_fused:
            return "one-shot, fused with norms"
        return "one-shot" if self.sum_impl == "one_shot" else self.backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Itself: a copy of a share belongs to the same group."""
        return self

    # -- tensors ---------------------------------------------------------------------------------

    def all_reduce(self, part: torch.Tensor, purpose: str) -> torch.Tensor:
        """The sum over all ranks of tensors of one shape."""
        return self._run(part, purpose, lambda x: rank_sum(x, self.name, self.sum_impl))

    def sum_add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, norm: nn.Module, purpose: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual`` plus `all_reduce` of the parts, and its norm; all ``[..., H]``."""
        impl = "triton" if self.is_fused else self.sum_impl
        return self._run(part, purpose, lambda x: sum_add_norm(x, residual, norm, self.name, impl))

    def all_gather(self, part: torch.Tensor, purpose: str) -> torch.Tensor:
        """``[size, ...]``: every rank's tensor, in rank order. All have one shape."""
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        found = self._run(part, purpose, lambda x: _wait(gather(x, self.size, self.name)))
        return found.view(self.size, *part.shape)

    def broadcast(self, value: torch.Tensor, purpose: str = "agree") -> torch.Tensor:
        """Rank 0's tensor; the other ranks give one of the same shape and dtype."""
        broadcast = torch.ops._c10d_functional.broadcast
        return self._run(value, purpose, lambda x: _wait(broadcast(x, 0, self.name)))

    def _run(
        self,
        part: torch.Tensor,
        purpose: str,
        collective: Callable[[torch.Tensor], T],
    ) -> T:
        part = part.contiguous()
        if torch.compiler.is_compiling():
            return collective(part)
        self.sent_bytes[purpose] += part.numel() * part.element_size()
        return self._guarded(lambda: collective(part))

    # -- small host values -----------------------------------------------------------------------

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order. For the beginning of things, not rounds."""
        found: list[Any] = [None] * self.size
        self._guarded(lambda: dist.all_gather_object(found, value, group=self.group))
        return found

    def follow(self, items: Iterable[T]) -> Iterator[T]:
        """Rank 0's picklable items on every rank, when all of them ask; others' are not looked at.

        So one rank reads files and clocks, and the others do what it does.
        """
        own = iter(items)
        while True:
            head = self.gather_objects(list(islice(own, 1)) if self.is_first else [])[0]
            if not head:
                return
            yield head[0]

    def largest(self, values: list[int]) -> list[int]:
        """The element-wise maximum of equally long lists."""
        part = torch.tensor(values, dtype=torch.int64, device=self.device)
        return self.all_gather(part, "agree").amax(dim=0).tolist()

    def first(self, values: list[int]) -> list[int]:
        """Rank 0's integers; the other ranks give as many."""
        part = torch.tensor(values, dtype=torch.int64, device=self.device)
        return self.broadcast(part).tolist()

    # -- failure ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """Close this rank's connections, so that the others stop waiting for it at once.

        Called where an error escapes from the middle of a generation: the ranks are no longer at
        the same point, so nothing that the group exchanged afterwards could be trusted.
        """
        if self.group is not None:
            close_scratch(self.name)
            close_memory(self.name)
            dist.destroy_process_group(self.group)
            self.group = None  # the connections close with the last reference

    def _guarded(self, run: Callable[[], Any]) -> Any:
        if self.group is None:
            raise RankError(f"rank {self.rank} of {self.size} left its group after an error")
        try:
            return run()
        except RuntimeError as error:  # what gloo and NCCL raise
            cause = " ".join(str(error).split())
            raise RankError(
                f"rank {self.rank} of {self.size} lost the other ranks: one of them died or did "
                f"not answer in time, so this one stops too ({cause})"
            ) from error


def _wait(value: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(value)
