"""Operators with a torch reference that is the specification. Kernels live in `ops.triton`."""

from .next_level import best_offer, choose_nodes
from .packing import PackedLinears
from .tree_attention import tree_attention

__all__ = ["PackedLinears", "best_offer", "choose_nodes", "tree_attention"]
