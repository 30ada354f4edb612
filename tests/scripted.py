"""Scripted drafts: what the engine must survive, dictated by a known continuation.

``Oracle``: the reference tokens as a chain, each beside wrong siblings. ``Liar``: never right.
``Mixed(k)``: right up to depth k (one number, or one per row), wrong beyond. Wrong nodes come
before the right one, so an accepted path has to be compacted, and below a wrong node hangs a trap:
the token that would be right at that depth, under a parent that is not.

    references = continuations(target, inputs, max_new_tokens=40)
    model = ScriptedModel(target, Oracle(references, vocab))
    model.generate(**inputs, speculative="eagle4", max_new_tokens=40)
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from eagle4 import Eagle4Config, Eagle4Drafter, Eagle4ForCausalLM
from eagle4.harness import FixedPolicy
from eagle4.types import Plan, Tree

FOREVER = 1 << 30


class _Node(NamedTuple):
    token: int
    parent: int  # -1 is the root
    depth: int
    score: float


class Mixed:
    """A draft that is right up to depth ``right``: one number for all rows, or one per row.

    ``references``: per row of the call the unpadded ids of prompt and continuation. ``siblings``
    wrong children stand beside every right one. Beyond a reference nothing is drafted.
    """

    def __init__(
        self,
        references: list[list[int]],
        vocab: int,
        right: int | Rows[int],
        siblings: int = 1,
    ):
        self.references = references
        self.vocab = vocab
        self.right = [right] * len(references) if isinstance(right, int) else list(right)
        self.siblings = siblings

    def __call__(self, state, sequences, plan: Plan, depth_limit: list[int], stats) -> Tree:
        rows = []
        for sequence, limit in zip(sequences, depth_limit, strict=True):
            known = self.references[sequence.index]
            future = known[sequence.length : sequence.length + min(limit, plan.max_depth)]
            rows.append(self._nodes(future, self.right[sequence.index], plan))
        stats.nodes_drafted += sum(len(nodes) for nodes in rows)
        return as_tree(rows, state.device)

    def _nodes(self, future: list[int], right: int, plan: Plan) -> list[_Node]:
        nodes: list[_Node] = []
        spine, trap = -1, None  # the deepest right node; the deepest node under a wrong one
        for depth, true in enumerate(future, start=1):
            level = []
            if spine is not None:
                is_right = depth <= right
                wrong = min(max(self.siblings, not is_right), plan.top_k - is_right)
                level += [((true + 1 + i) % self.vocab, spine) for i in range(wrong)]
                level += [(true, spine)] * is_right
            if trap is not None:
                level.insert(0, (true, trap))
            level = level[max(0, len(level) - (plan.max_nodes - len(nodes))) :]
            if not level:
                break
            first = len(nodes)
            for token, parent in level:
                nodes.append(_Node(token, parent, depth, -0.1 * depth))
            grown_right = level[-1] == (true, spine) and depth <= right
            # A level starts with a wrong node or a trap, unless only the spine grew.
            trap = first if len(level) > grown_right else None
            spine = len(nodes) - 1 if grown_right else None
        return nodes


class Oracle(Mixed):
    """Right at every depth."""

    def __init__(self, references: list[list[int]], vocab: int, siblings: int = 1):
        super().__init__(references, vocab, FOREVER, siblings)


class Liar(Mixed):
    """Never right."""

    def __init__(self, references: list[list[int]], vocab: int, siblings: int = 2):
        super().__init__(references, vocab, 0, siblings)


class ScriptedModel(Eagle4ForCausalLM):
    """`Eagle4ForCausalLM` whose draft is a script. The drafter only decides the taps."""

    def __init__(self, target: PreTrainedModel, draft: Any, drafter: Eagle4Drafter | None = None):
        super().__init__(target, small_drafter(target) if drafter is None else drafter)
        self.draft = draft

    def _speculation(self, config, request, *pair):
        return (None, None) if config is None else (FixedPolicy(config), self.draft)


def small_drafter(target: PreTrainedModel, seed: int = 0, **overrides: Any) -> Eagle4Drafter:
    """A random drafter for a tiny target, with few candidates."""
    settings = {"candidate_rank": 8, "num_candidates": 16, **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Eagle4Drafter(Eagle4Config.for_target(target.config, **settings)).eval()


def continuations(
    target: PreTrainedModel, inputs: dict[str, Any], **kwargs: Any
) -> list[list[int]]:
    """What plain Transformers generates greedily: unpadded prompt and continuation per row."""
    out = target.generate(**inputs, do_sample=False, **kwargs)
    return unpadded(out, inputs)


def unpadded(out: torch.Tensor, inputs: dict[str, Any]) -> list[list[int]]:
    """Rows of ``out`` without the prompt's left padding."""
    mask = inputs.get("attention_mask")
    pads = [0] * len(out) if mask is None else (mask == 0).sum(dim=1).tolist()
    return [row[pad:].tolist() for row, pad in zip(out, pads, strict=True)]


def as_tree(rows: list[list[_Node]], device: torch.device | str = "cpu") -> Tree:
    """`types.Tree` of per-sequence node lists ``(token, parent, depth, score)``."""
    most = max((len(nodes) for nodes in rows), default=0)
    empty = _Node(0, -1, 0, float("-inf"))
    padded = [list(nodes) + [empty] * (most - len(nodes)) for nodes in rows]

    def column(index: int, dtype: torch.dtype) -> torch.Tensor:
        values = [[node[index] for node in nodes] for nodes in padded]
        return torch.tensor(values, dtype=dtype, device=device).view(len(rows), most)

    return Tree(
        column(0, torch.int64),
        column(1, torch.int64),
        column(2, torch.int64),
        column(3, torch.float32),
        torch.tensor([len(nodes) for nodes in rows], device=device),
    )
