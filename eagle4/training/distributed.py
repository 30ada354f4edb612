"""One process or many: what the trainer asks of accelerate and of torch's FSDP2.

`Workers` is the only place that knows how many processes there are. Every process computes its
share of an optimiser step's runs, weighted by the counts of the whole step, so that the sum over
processes is the gradient of one process with all runs. Gradients are averaged by DDP
(``"replicate"``) or FSDP2 (``"shard"``: weights, gradients and optimiser state are divided), hence
the factor `Workers.world` in the loss.

accelerate's own FSDP2 plugin refuses CPU processes, so `fully_shard` is called here, the same on
every device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..drafter.model import Eagle4Drafter

T = TypeVar("T")


class Forward(nn.Module):
    """Gives DDP and FSDP2 a forward to hook into, whatever is computed with the drafter."""

    def __init__(self, drafter: Eagle4Drafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, compute: Callable[[Eagle4Drafter], T]) -> T:
        return compute(self.drafter)


class Workers:
    """The processes of a run, and the drafter as they share it."""

    def __init__(self, device: torch.device, trackers: tuple[str, ...] = (), folder: Any = None):
        self.accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="no",  # the trainer's own autocast, so that settings live in one place
            log_with=list(trackers) or None,
            project_dir=folder,
        )
        self.trackers = trackers
        self.module: nn.Module | None = None

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def wrap(self, drafter: Eagle4Drafter, sharding: str) -> None:
        """Prepare the drafter's training forward; with ``"shard"`` its parameters are replaced."""
        forward = Forward(drafter)
        if self.world == 1:
            self.module = forward
        elif sharding == "replicate":
            self.module = self.accelerator.prepare_model(forward)
        else:
            kind = self.accelerator.device.type
            fully_shard(forward, mesh=init_device_mesh(kind, (self.world,)))
            self.module = forward

    def __call__(self, compute: Callable[[Eagle4Drafter], T]) -> T:
        """Run a computation with the drafter under the hooks of DDP or FSDP2."""
        assert self.module is not None, "wrap comes first"
        found = self.module(compute)
        # FSDP2 divides its weights again after a backward pass; without one nobody tells it to
        if isinstance(self.module, FSDPModule) and not torch.is_grad_enabled():
            self.module.reshard()
        return found

    def accumulating(self, is_last: bool) -> AbstractContextManager:
        """Gradients are exchanged with the last micro-batch only."""
        if self.world == 1 or is_last or not hasattr(self.module, "no_sync"):
            return nullcontext()
        return self.module.no_sync()  # type: ignore[union-attr, operator]

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over processes."""
        value = value.to(self.accelerator.device)
        return self.accelerator.reduce(value, "sum") if self.world > 1 else value  # type: ignore

    def agree(self, value: float) -> float:
        """The main process's number on every process."""
        if self.world == 1:
            return value
        mine = torch.tensor(value if self.is_main else 0.0, dtype=torch.float64)
        return float(self.total(mine))

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()

    def log(self, values: dict[str, float], step: int) -> None:
        """Hand numbers to the trackers that were asked for (tensorboard, wandb, ...)."""
        if self.trackers:
            self.accelerator.log(values, step=step)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP2 may have divided; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """A whole tensor divided as ``reference`` is."""
    if not isinstance(reference, DTensor):
        return value
    value = value.to(reference.device)
    return distribute_tensor(value, reference.device_mesh, reference.placements, src_data_rank=None)
