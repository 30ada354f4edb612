"""Which form of an operator runs: the one place where this is decided.

Every operator takes ``impl``: "torch" is the reference, "triton" the kernel, "auto" (the default)
the kernel for CUDA tensors where ``EAGLE4_KERNELS=1`` is set, the reference for everything else.
Kernels are opt-in because no GPU has run and timed them yet.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

HAS_TRITON = importlib.util.find_spec("triton") is not None
IMPLS = ("auto", "torch", "triton")


def wants_triton(impl: str, *tensors: torch.Tensor, fits: Callable[[], bool] | None = None) -> bool:
    """Whether the kernel runs on these tensors; ``fits``: whether it can hold these sizes.

    ``fits`` is asked last and only where there are kernels: looking at a size bounds it in a
    compiled graph.

    "auto" keeps the reference where gradients or autocast are wanted: kernels know neither. Raises
    `ValueError` for an unknown ``impl``, and for "triton" where the sizes do not fit.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not understood; pass one of {', '.join(IMPLS)}")
    if impl == "triton" and fits is not None and not fits():
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"the kernel cannot hold tensors of shapes {shapes}; pass impl='auto'")
    if impl != "auto":
        return impl == "triton"
    if not has_kernels(tensors[0].device):
        return False
    if torch.is_autocast_enabled(tensors[0].device.type):
        return False
    # Quantised and distributed tensors hold something else than what they look like.
    if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return fits is None or fits()


def has_kernels(device: torch.device) -> bool:
    """Whether kernels run on this device: CUDA or ROCm, with Triton installed, and asked for."""
    return HAS_TRITON and device.type == "cuda" and os.environ.get("EAGLE4_KERNELS") == "1"


def is_stock(linear: nn.Module) -> bool:
    """Whether the module computes ``x W^T + b`` from its weight and nothing else.

    Adapters, hooks (tensor parallelism) and replaced forwards have to be called.
    """
    is_hooked = linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) is nn.Linear and not is_hooked and "forward" not in linear.__dict__
