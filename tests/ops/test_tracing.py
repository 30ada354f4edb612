"""Catches: an operator that breaks a compiled graph, hides its kernels from the compiler, gives
other shapes when traced than when run, or whose writes the compiler does not see.

Nothing is launched: a compiler that only looks at the graph stands in for Inductor.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from eagle4.ops import (
    PagedView,
    accept_walk,
    ancestor_words,
    best_candidates,
    candidate_logprobs,
    choose_nodes,
    coupled_rows,
    grow_level,
    move_rows,
    normed_linear,
    paged_attention,
    prune,
    rejection_rows,
    small_linear,
)
from eagle4.types import Candidates, Tree

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="only real kernels can be traced"
)

IMPL = {"impl": "triton"}


class Hopper:
    """A driver that names a GPU: the compiler reads the kernels' code to see what they write."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def target_of_the_kernels(monkeypatch):
    from triton.runtime import driver

    if not torch.cuda.is_available():
        monkeypatch.setattr(driver, "_active", Hopper())


class Seen(Exception):
    """Raised by the stand-in compiler when it has seen its graph."""


def graph_of(function, *args, dynamic: bool) -> torch.fx.GraphModule:
    """The functional graph that a compiler gets for the function, in one piece."""
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, inputs):
        graphs.append(graph)
        raise Seen

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=look)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    with pytest.raises(Exception) as error, torch.no_grad():
        compiled(*args)
    assert graphs, error.value
    return graphs[0]


def calls(graph: torch.fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def shapes_of(graph: torch.fx.GraphModule) -> list[tuple[int, ...]]:
    """Shapes of the outputs; inputs that the graph writes come first."""
    (outputs,) = graph.graph.output_node().args
    values = [value.meta["val"] for value in outputs]  # type: ignore[union-attr]
    return [tuple(map(int, value.shape)) for value in values if isinstance(value, torch.Tensor)]


def num_kernels(counted: Counter[str]) -> int:
    return sum(count for name, count in counted.items() if "triton_kernel_wrapper" in name)


def a_tree(nodes: int) -> Tree:
    index = torch.arange(nodes).repeat(2, 1)
    return Tree(index, index - 1, index + 1, -index.float(), torch.full((2,), nodes))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_round_of_operators_is_one_graph(dynamic):
    linear, up = nn.Linear(16, 16, bias=False), nn.Linear(16, 300, bias=False)
    for module in (linear, up):
        module.requires_grad_(False)
    norms = [nn.RMSNorm(16) for _ in range(2)]
    for norm in norms:
        norm.variance_epsilon = norm.eps = 1e-6
    view = PagedView(
        torch.arange(8).view(2, 4), torch.tensor([5, 3]), torch.ones(2, 3, 1).long(),
        torch.zeros(2, 3).long(), torch.zeros(2, 3).long(),
    )  # fmt: skip

    def round_of(rows, query, pool, pool_tree, logp):
        fused = normed_linear([rows, rows], norms, wide, **IMPL)
        out = paged_attention(query, pool, pool, view, 4, **IMPL)
        token = best_candidates(fused, up, 4, **IMPL)
        logp = candidate_logprobs(up, fused, token, **IMPL)[:, :2]
        frontier = torch.zeros(2, 3, dtype=torch.int64)
        order = grow_level(pool_tree, frontier, Candidates(token[:, :2], logp), 3, **IMPL)
        pruned = prune(pool_tree, 5, torch.tensor([3, 3]), **IMPL)
        return out, order, pruned, ancestor_words(pruned.parent_BN, **IMPL)

    wide = nn.Linear(32, 16, bias=False).requires_grad_(False)
    pool_tree = Tree(*(column.clone() for column in a_tree(16)[:4]), torch.tensor([4, 4]))
    args = (torch.randn(6, 16), torch.randn(2, 3, 4, 16), torch.randn(32, 2, 16))
    graph = graph_of(round_of, *args, pool_tree, torch.zeros(6, 2), dynamic=dynamic)
    counted = calls(graph)
    # normed_linear 1, attention 1, candidates 4 + 1, grow 1, prune 1, words 1
    assert num_kernels(counted) == 10, counted
    assert not any("eagle4" in name for name in counted), counted
    # The pool's four columns, written in place, come first: nothing else counts as written.
    written = [(2, 16)] * 4
    assert shapes_of(graph) == [*written, (2, 3, 4, 16), (2, 3), *[(2, 5)] * 4, (2,), (2, 5)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_verification_and_commit_are_one_graph(dynamic):
    linear = nn.Linear(16, 8).requires_grad_(False)

    def verify(score, key, law, tree, matrix, pools, rows):
        choice = coupled_rows(score, key, **IMPL).view(2, 5)
        token, refused = rejection_rows(score, key, key, *law, **IMPL)
        verdict = accept_walk(tree, matrix, choice + 0 * token.view(2, 5), **IMPL)
        move_rows(pools, verdict.path_BS[0], verdict.path_BS[1], addresses, **IMPL)
        survival = tree.depth_BN.unsqueeze(0) << 20
        chosen = choose_nodes(survival, key[:1], key[:4].unsqueeze(0), 3, **IMPL)
        return verdict, refused, chosen, small_linear(rows, linear, **IMPL)

    addresses = torch.zeros(2, 2, dtype=torch.int64)
    law = torch.zeros(10, 3).long(), torch.zeros(10, 6).long(), torch.zeros(10, 6).double()
    matrix, key = torch.ones(2, 4, 4).tril().bool(), torch.arange(10)
    pools = [torch.zeros(9, 2, 8), torch.zeros(9, 2, 8)]
    args = (torch.randn(10, 50), key, law, a_tree(4), matrix, pools, torch.randn(3, 16))
    graph = graph_of(verify, *args, dynamic=dynamic)
    counted = calls(graph)
    # coupled 1, rejection 3, walk 1, choose 1
    assert num_kernels(counted) == 6, counted
    opaque = {name for name in counted if "eagle4" in name}
    assert opaque == {"eagle4.small_linear.default"} | {n for n in opaque if "auto_func" in n}
    written = [tuple(pool.shape) for pool in pools]
    assert shapes_of(graph) == [*written, (2, 4), (2,), (2,), (10,), (1, 2, 4), (3, 8)]
