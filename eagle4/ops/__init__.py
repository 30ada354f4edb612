"""Operators with a torch reference that is the specification. Kernels live in `ops.triton`."""

from .packing import PackedLinears
from .tree_attention import tree_attention

__all__ = ["PackedLinears", "tree_attention"]
