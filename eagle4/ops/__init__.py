"""Operators with a torch reference that is the specification. Kernels live in `ops.triton`."""

from .block_topk import block_topk
from .divergence import divergence
from .next_level import best_offer, choose_nodes
from .packing import PackedLinears
from .precision import has_fast_bf16
from .tree_attention import fold_visible, tree_attention
from .tree_conv import chain_conv, conv_sources, tree_conv
from .tree_gdn import TreePaths, advance_gdn_, tree_gdn

__all__ = ["PackedLinears", "best_offer", "block_topk", "choose_nodes", "fold_visible"]
__all__ += ["TreePaths", "advance_gdn_", "chain_conv", "conv_sources", "divergence"]
__all__ += ["has_fast_bf16", "tree_attention", "tree_conv", "tree_gdn"]
