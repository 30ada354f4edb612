"""Operators with a torch reference that is the specification. Kernels live in `ops.triton`."""

from .packing import PackedLinears
from .precision import has_fast_bf16
from .tree_attention import fold_visible, tree_attention

__all__ = ["PackedLinears", "fold_visible", "has_fast_bf16", "tree_attention"]
