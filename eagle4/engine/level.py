"""What a round runs on the device, as functions of tensors: no host read, fixed shapes.

    draft      the drafter's layer on packed rows
    propose    its head: candidates behind every row
    open_tree  the root's children, and whether and how widely they are expanded
    level      the drafter on the frontier, its children, and the next such decision
    finish     which nodes are verified, as a tree

The decisions are those of `harness.policy`, taken by its tensor twin. `engine.graphs` compiles
these functions; run as they are, they are the specification of their compiled forms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import tree as trees
from ..cache import Expanded, LayerStep, Scratch, attend_layer, scratch_layer
from ..drafter import DraftOutput, Eagle4Drafter
from ..harness import device_policy
from ..harness.fixed_point import ONE
from ..ops import grow_level
from ..types import Candidates
from .canvas import Canvas, Finished, Terms, TreeLimits

MAX_CANDIDATES = 128  # of a law that tokens are drawn from
NOT_FINITE = -1  # the width that stands for unusable probabilities


def draft(
    drafter: Eagle4Drafter,
    hidden_RH: torch.Tensor,
    token_R: torch.Tensor,
    position_R: torch.Tensor,
    step: LayerStep,
) -> DraftOutput:
    """One drafter step on packed rows; their K/V goes to the slots of ``step``."""

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        window = drafter.config.sliding_window
        return attend_layer(step, query, key, value, sliding_window=window)

    return drafter(hidden_RH, token_R, position_R, attention)


def propose(drafter: Eagle4Drafter, head_RH: torch.Tensor) -> Candidates:
    """As many of the drafter's candidates behind every row as anybody asks for, best first."""
    return drafter.propose(head_RH, min(drafter.num_proposable, MAX_CANDIDATES))


def open_tree(
    drafter: Eagle4Drafter, root: DraftOutput, terms: Terms, limits: TreeLimits
) -> tuple[Canvas, torch.Tensor]:
    """The tree's first level from depth 0's last rows ``[B, H]``, and the next level's decision."""
    return start(root, drafter.propose(root.head_RH, limits.top_k), terms, limits)


def level(
    drafter: Eagle4Drafter,
    canvas: Canvas,
    pools: tuple[torch.Tensor, torch.Tensor],
    scratch: Scratch,
    terms: Terms,
    limits: TreeLimits,
    width: int,
) -> tuple[Canvas, torch.Tensor]:
    """Expand the best ``width`` nodes of the frontier; ``pools``: the drafter's K and V."""
    canvas, rows, out = expand(draft, drafter, canvas, pools, scratch, width)
    candidates = drafter.propose(out.head_RH, limits.top_k)
    return extend(canvas, rows, out, candidates, terms, limits)


def finish(canvas: Canvas, terms: Terms, limits: TreeLimits) -> Finished:
    """The nodes worth verifying over the whole batch, depth-first."""
    survival_BP = canvas.survival_BP
    prices = terms.prices(len(survival_BP), limits.top_k)
    chosen_BP = device_policy.choose(survival_BP[None], limits.max_nodes, prices)[0]
    tree = trees.take(canvas.pool, chosen_BP, limits.max_nodes)
    return Finished(tree, chosen_BP, (survival_BP * chosen_BP).sum())


def start(
    root: DraftOutput, candidates: Candidates, terms: Terms, limits: TreeLimits
) -> tuple[Canvas, torch.Tensor]:
    """`open_tree` for candidates that are known already."""
    batch, device = len(root.state_RH), root.state_RH.device
    pool, node_BK, _, _ = trees.start(candidates, limits.max_depth, limits.top_k)
    none_BP = torch.zeros_like(pool.token_BN)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    canvas = Canvas(
        pool,
        none_BP,
        none_BP,
        node_BK,
        root.state_RH.unsqueeze(1).repeat(1, limits.top_k, 1),
        torch.zeros(batch, limits.top_k, limits.entries, dtype=torch.bool, device=device),
        torch.zeros(limits.entries, dtype=torch.int64, device=device),
        zero,
        zero + 1,
    )
    whole_B1 = torch.full_like(node_BK[:, :1], ONE)
    canvas = _valued(canvas, whole_B1, candidates, terms, first=0)
    return canvas, _decision(canvas, candidates, terms, limits)


def expand(
    run: Callable[..., DraftOutput],
    drafter: Eagle4Drafter,
    canvas: Canvas,
    pools: tuple[torch.Tensor, torch.Tensor],
    scratch: Scratch,
    width: int,
) -> tuple[Canvas, Expanded, DraftOutput]:
    """The drafter (``run``: `draft`, compiled or not) on the best ``width`` frontier nodes.

    Returns the canvas with these rows noted, the rows as attention saw them, and what came out.
    """
    index_M = torch.arange(width, device=canvas.num_rows.device)
    place_W = torch.arange(canvas.depth_W.shape[0], device=index_M.device) - canvas.num_rows
    itself_MW = place_W == index_M.unsqueeze(1)
    depth_W = torch.where((place_W >= 0) & (place_W < width), canvas.depth, canvas.depth_W)
    # A row's position is that of its token's features: one before the token's own.
    behind_B1 = scratch.prefix_B.unsqueeze(1) - 1
    position_BM = (behind_B1 + canvas.depth).repeat(1, width)
    sees_BMW = _first(canvas.sees_BKW, width) | itself_MW
    rows = Expanded(canvas.num_rows, sees_BMW, position_BM, behind_B1 + depth_W)
    heads, heads_kv = drafter.num_heads
    window = drafter.config.sliding_window
    step = scratch_layer(scratch, *pools, rows, heads // heads_kv, window)
    token_BM = canvas.pool.token_BN.gather(1, _first(canvas.node_BK, width))
    hidden_RH = _first(canvas.state_BKH, width).flatten(0, 1)
    out = run(drafter, hidden_RH, token_BM.flatten(), position_BM.flatten(), step)
    return canvas._replace(depth_W=depth_W, num_rows=canvas.num_rows + width), rows, out


def extend(
    canvas: Canvas,
    rows: Expanded,
    out: DraftOutput,
    candidates: Candidates,
    terms: Terms,
    limits: TreeLimits,
) -> tuple[Canvas, torch.Tensor]:
    """Add the children of the expanded rows, choose the next frontier, decide."""
    pool, top_k = canvas.pool, limits.top_k
    batch, width = rows.position_BM.shape
    parent_BM = _first(canvas.node_BK, width)
    best_BK = grow_level(pool, parent_BM, candidates, top_k)
    from_BK1 = (best_BK // top_k).unsqueeze(-1)
    state_BMH = out.state_RH.unflatten(0, (batch, width))
    first_B1 = pool.count_B.unsqueeze(1)
    grown = canvas._replace(
        pool=pool._replace(count_B=pool.count_B + width * top_k),
        node_BK=first_B1 + best_BK,
        state_BKH=state_BMH.gather(1, from_BK1.expand(-1, -1, state_BMH.shape[-1])),
        sees_BKW=rows.sees_BMW.gather(1, from_BK1.expand(-1, -1, rows.sees_BMW.shape[-1])),
        depth=canvas.depth + 1,
    )
    parent_survival_BM = canvas.survival_BP.gather(1, parent_BM)
    grown = _valued(grown, parent_survival_BM, candidates, terms, first_B1)
    return grown, _decision(grown, candidates, terms, limits)


def _first(columns: torch.Tensor, width: int) -> torch.Tensor:
    """``columns[:, :width]``, the same to a compiler whether that is all of them or not."""
    return columns.index_select(1, torch.arange(width, device=columns.device))


def _valued(
    canvas: Canvas,
    parent_BM: torch.Tensor,
    candidates: Candidates,
    terms: Terms,
    first: torch.Tensor | int,
) -> Canvas:
    """With probabilities and survivals of the newest children; ``parent_BM``: their parents'."""
    batch, width = parent_BM.shape
    _, limit_B = terms.limits(batch)
    parent_BM = parent_BM * (canvas.depth <= limit_B).unsqueeze(1)
    prob_BMJ = device_policy.quantise(candidates.logp_RK).unflatten(0, (batch, width))
    child_BMJ = device_policy.survivals(parent_BM[None], prob_BMJ[None], canvas.depth, terms.book)
    prob_BC, child_BC = prob_BMJ.flatten(1), child_BMJ[0].flatten(1)
    index_C = torch.arange(prob_BC.shape[1], device=prob_BC.device)
    column_BC = (first + index_C).expand(batch, -1)
    return canvas._replace(
        prob_BP=canvas.prob_BP.scatter(1, column_BC, prob_BC),
        survival_BP=canvas.survival_BP.scatter(1, column_BC, child_BC),
    )


def _decision(
    canvas: Canvas, candidates: Candidates, terms: Terms, limits: TreeLimits
) -> torch.Tensor:
    """int64 ``[2]``: the next level's width, 0 to stop or `NOT_FINITE`; its gain in nanoseconds."""
    batch = len(canvas.node_BK)
    deepest, _ = terms.limits(batch)
    found = device_policy.next_level(
        canvas.survival_BP[None],
        canvas.survival_BP.gather(1, canvas.node_BK)[None],
        canvas.prob_BP.gather(1, canvas.node_BK)[None],
        canvas.depth,
        deepest,
        *(limits.min_width, limits.top_k, limits.max_nodes),
        terms.book,
        terms.prices(batch, limits.top_k),
    )
    is_finite = torch.isfinite(candidates.logp_RK[:, 0]).all()
    width_Z = torch.where(is_finite, found.width_Z, NOT_FINITE)
    return torch.cat([width_Z, found.gain_ns_Z])
