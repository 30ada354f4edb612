"""Operators with a torch reference that is the specification. Kernels live in `ops.triton`."""

from .block_topk import block_topk
from .packing import PackedLinears
from .precision import has_fast_bf16
from .tree_attention import fold_visible, tree_attention

__all__ = ["PackedLinears", "block_topk", "fold_visible", "has_fast_bf16", "tree_attention"]
