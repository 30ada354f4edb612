"""Launching kernels: from inside a `torch.library.triton_op` or a `custom_op`."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.jit import JITFunction


def wrap_triton(kernel: Any) -> Any:
    """`torch.library.wrap_triton` that also takes kernels of the Triton interpreter.

    Under the interpreter (``TRITON_INTERPRET=1``) a kernel is no `JITFunction`: it is called as it
    is, and not at all on fake tensors, which hold nothing to compute on.
    """
    if isinstance(kernel, JITFunction):
        return torch.library.wrap_triton(kernel)
    return _Interpreted(kernel)


class _Interpreted:
    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*args, **kwargs) -> None:
            if not any(isinstance(arg, FakeTensor) for arg in (*args, *kwargs.values())):
                self.kernel[grid](*args, **kwargs)

        return run


def opaque(kernel: Any) -> Any:
    """The kernel itself: for a `torch.library.custom_op`, into which no compiler looks."""
    return kernel
