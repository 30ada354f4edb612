"""Catches: a row that depends on its neighbours, on padding, on its slots, or on tree nodes that
are not its ancestors; caches that a round leaves different from a fresh prefill.
"""

from __future__ import annotations

import pytest
import torch
import zoo
from packed import Packer, Rows, chain, plain_logits

PROMPTS = (
    [5, 17, 3, 60, 41, 8, 77, 29, 90, 12, 33, 64, 2, 51, 19],
    [44],
    [9, 23, 71, 6, 35, 88, 14, 52],
)
# Two branches with a cousin between parent and child, and a second root child.
PARENTS = [-1, 0, -1, 1, 0, 2, 4]
NODES = [7, 30, 31, 55, 9, 62, 18]
FAMILIES = ["llama", "gemma3", "gpt_oss", "gpt2"]
BITWISE = ["llama", "gemma3", "gpt2"]  # a router groups rows by expert, so shapes vary


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return zoo.build(request.param)


@pytest.fixture(scope="module", params=BITWISE)
def dense_target(request):
    return zoo.build(request.param)


def tree(sequence: int, tokens: list[int] = NODES) -> Rows:
    return Rows(sequence, len(PROMPTS[sequence]), tokens, PARENTS)


def path(node: int) -> list[int]:
    return ([] if PARENTS[node] < 0 else path(PARENTS[node])) + [node]


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found - wanted).abs().max()) < 1e-4 * float(wanted.std())


def solo(target, sequence: int) -> torch.Tensor:
    """Tree logits of one sequence that is alone in its call."""
    packer = Packer(target, 3)
    packer.run(chain(sequence, 0, PROMPTS[sequence]))
    return packer.run(tree(sequence)).logits_RV


@pytest.mark.parametrize("layout", ["together", "other order", "scattered", "small tree beside"])
def test_rows_do_not_depend_on_neighbours_slots_or_order(target, layout):
    packer = Packer(target, 3, page_size=4 if layout == "scattered" else 64)
    if layout == "scattered":
        packer.scatter(3, 24)
    order = [2, 0, 1] if layout == "other order" else [0, 1, 2]
    for sequence in order:
        packer.run(chain(sequence, 0, PROMPTS[sequence]))
    parts = [tree(sequence) for sequence in order]
    if layout == "small tree beside":
        parts[1] = chain(1, 1, [3])
    out = packer.run(*parts).logits_RV.split([len(part.tokens) for part in parts])
    for part, logits in zip(parts, out, strict=True):
        if len(part.tokens) == len(NODES):
            assert near(logits, solo(target, part.sequence)), part.sequence


def test_a_neighbours_tokens_change_nothing_at_all(dense_target):
    """Same shapes, other contents: bit for bit."""
    outs = []
    for shift in (0, 1):
        packer = Packer(dense_target, 2)
        packer.run(chain(0, 0, PROMPTS[0]), chain(1, 0, [t + shift for t in PROMPTS[1]]))
        out = packer.run(tree(0), tree(1, [token + shift for token in NODES])).logits_RV
        outs.append(out)
    assert torch.equal(outs[0][: len(NODES)], outs[1][: len(NODES)])
    assert not torch.equal(outs[0][len(NODES) :], outs[1][len(NODES) :])


@pytest.mark.parametrize("changed", range(len(NODES)))
def test_only_ancestors_matter(dense_target, changed):
    """Another token at one node changes its own row and its descendants', and no other bit."""
    outs = []
    for token in (NODES[changed], NODES[changed] + 1):
        packer = Packer(dense_target)
        packer.run(chain(0, 0, PROMPTS[0]))
        nodes = [token if i == changed else t for i, t in enumerate(NODES)]
        outs.append(packer.run(tree(0, nodes)).logits_RV)
    for node in range(len(NODES)):
        depends = changed in path(node)
        assert torch.equal(outs[0][node], outs[1][node]) != depends, node


def test_every_node_is_the_end_of_its_path(target):
    logits = solo(target, 0)
    for node in range(len(NODES)):
        tokens = PROMPTS[0] + [NODES[i] for i in path(node)]
        assert near(logits[node], plain_logits(target, tokens)[-1]), node


@pytest.mark.parametrize("sizes", [[15], [1] * 15, [4, 4, 7], [14, 1]])
def test_prefill_may_come_in_any_chunks(target, sizes):
    packer, start, logits = Packer(target), 0, []
    for size in sizes:
        logits.append(packer.run(chain(0, start, PROMPTS[0][start : start + size])).logits_RV)
        start += size
    assert near(torch.cat(logits), plain_logits(target, PROMPTS[0]))


def test_a_compacted_path_is_what_a_fresh_prefill_stores(target):
    """Nodes 0, 1, 3 are accepted; their entries move behind the prefix."""
    packer = Packer(target)
    packer.run(chain(0, 0, PROMPTS[0]))
    packer.run(tree(0))
    prefix = len(PROMPTS[0])
    old = torch.tensor([packer.table.slot(0, prefix + node) for node in path(3)])
    new = torch.tensor([packer.table.slot(0, prefix + i) for i in range(3)])
    packer.pool.move(old, new)
    fresh = Packer(target)
    tokens = PROMPTS[0] + [NODES[node] for node in path(3)]
    fresh.run(chain(0, 0, tokens))
    count = len(tokens)
    for layer, pair in fresh.pool.layers.items():
        for wanted, found in zip(pair, packer.pool.layers[layer], strict=True):
            assert near(found[:count], wanted[:count]), layer
    follow = packer.run(chain(0, count, [11, 12])).logits_RV
    assert near(follow, plain_logits(target, tokens + [11, 12])[-2:])


def test_only_asked_rows_get_logits(target):
    packer = Packer(target)
    keep = torch.tensor([14, 2])
    out = packer.run(chain(0, 0, PROMPTS[0]), keep=keep)
    assert near(out.logits_RV, plain_logits(target, PROMPTS[0])[keep])
