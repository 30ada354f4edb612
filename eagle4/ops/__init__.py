"""Operators with a torch reference that is the specification. Kernels live in `ops.triton`.

In: tensors of any device, small modules where packed CPU weights matter. Out: tensors. Always:
``impl="auto"`` runs the kernel on CUDA tensors and the reference elsewhere (`dispatch`), and both
agree.
"""

from .accept_walk import accept_walk
from .ancestors import ancestor_matrix, ancestor_words
from .bits import pack_bits, unpack_bits
from .block_topk import block_topk
from .candidate_head import best_candidates, candidate_logprobs
from .coupled import coupled_rows
from .dispatch import has_kernels
from .divergence import divergence
from .grow_level import grow_level
from .input_stage import normed_linear
from .move_rows import move_rows, row_addresses
from .next_level import best_offer, choose_nodes
from .packing import PackedLinears
from .paged_attention import PagedView, page_slots, paged_attention, window_visible
from .precision import has_fast_bf16
from .prune import prune
from .rank_sum import rank_sum
from .rejection import rejection_rows
from .small_gemm import small_linear
from .sum_add_norm import sum_add_norm
from .tree_attention import Share, fold_visible, ragged_attention, tree_attention
from .tree_conv import chain_conv, conv_sources, tree_conv
from .tree_gdn import TreePaths, advance_gdn_, tree_gdn

__all__ = [
    "PackedLinears",
    "PagedView",
    "Share",
    "accept_walk",
    "ancestor_matrix",
    "ancestor_words",
]
__all__ += ["best_candidates", "best_offer", "block_topk", "candidate_logprobs", "choose_nodes"]
__all__ += ["coupled_rows", "fold_visible", "grow_level", "has_fast_bf16", "has_kernels"]
__all__ += ["move_rows", "normed_linear", "pack_bits", "paged_attention", "prune"]
__all__ += [
    "ancestor_words",
    "ragged_attention",
    "rank_sum",
    "rejection_rows",
    "row_addresses",
    "small_linear",
    "sum_add_norm",
    "tree_attention",
    "unpack_bits",
]
__all__ += ["TreePaths", "advance_gdn_", "chain_conv", "conv_sources", "divergence"]
__all__ += ["tree_conv", "tree_gdn", "page_slots", "window_visible"]
