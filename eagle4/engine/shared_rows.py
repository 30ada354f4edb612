"""What all ranks know about rows of logits whose columns they share, after one exchange.

Enough to choose behind every row greedily, coupled (the same noise on every rank) or by rejection,
for which all tokens that the drafter did not propose count as one.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList

from ..noise import Purpose, gumbel, position_key
from ..parallel import VocabShard
from ..parallel.vocabulary import first_best
from ..sampling import check_law
from ..types import Law, Tree
from ..verify import Outside, choose_rejection_apart
from .state import Sequence, State


class SharedRows:
    """Packed rows, root first per sequence; ``token_R`` is the best token of each.

    Of a row with drawn children it is the best of the tokens that were no candidates.
    """

    def __init__(
        self,
        state: State,
        sequences: list[Sequence],
        tree: Tree,
        law: Law | None,
        warpers: LogitsProcessorList,
        logits_RV: torch.Tensor,
        vocab: VocabShard,
    ):
        counts = tree.count_B.tolist()
        self.first_row = [sum(counts[:b]) + b for b in range(len(counts))]
        # Only warpers that act on every score alone come here; they look at no history.
        score_RV = warpers(torch.empty(0), logits_RV.float())  # type: ignore[arg-type]
        if state.sampler is None:
            self.value_R, self.token_R = vocab.best(score_RV)
            return
        self._apart: dict[tuple[int, int], torch.Tensor] = {}  # (b, row) -> candidates' scores
        if law is not None:
            score_RV = self._set_apart(tree, law, counts, score_RV, vocab)
        key_R = torch.tensor(_position_keys(state, sequences, tree, counts), device=state.device)
        score_RV = score_RV.double()
        noise_RV = gumbel(key_R.unsqueeze(1), vocab.token_ids(state.device))
        mass_R1 = score_RV.logsumexp(dim=-1, keepdim=True)
        part_R3 = torch.cat([vocab.local_best(score_RV + noise_RV), mass_R1], dim=-1)
        found_WR3 = vocab.ranks.all_gather(part_R3, "verify")
        self.value_R, self.token_R = first_best(found_WR3[..., :2])
        self.mass_R = found_WR3[..., 2].logsumexp(dim=0)

    def token(self, b: int, row: int) -> torch.Tensor:
        """The coupled choice behind a row. Raises `RuntimeError` for scores that are no law."""
        place = self.first_row[b] + row
        check_law(self.value_R[place])
        return self.token_R[place]

    def reject(self, b: int, row: int, key: int, position: int, *drawn: torch.Tensor):
        """`verify.choose_rejection` behind a row; ``drawn`` are its last three arguments."""
        place = self.first_row[b] + row
        rest = Outside(self.mass_R[place], self.value_R[place], self.token_R[place])
        return choose_rejection_apart(self._apart[b, row], rest, key, position, *drawn)

    def _set_apart(
        self, tree: Tree, law: Law, counts: list[int], score_RV: torch.Tensor, vocab: VocabShard
    ) -> torch.Tensor:
        """Exchange the candidates' scores of rows with children; returns the others' scores."""
        parents = [set(row[:n]) for row, n in zip(tree.parent_BN.tolist(), counts, strict=True)]
        rows = [(b, node + 1) for b, found in enumerate(parents) for node in sorted(found)]
        if not rows:
            return score_RV
        device = score_RV.device
        place_I = torch.tensor([self.first_row[b] + row for b, row in rows], device=device)
        token_IC = torch.stack([law.token_BRC[b, row] for b, row in rows])
        is_own_IC = (token_IC >= vocab.first) & (token_IC < vocab.last)
        column_IC = torch.where(is_own_IC, token_IC - vocab.first, vocab.share.size)
        # Candidates of other ranks fall into a column of their own.
        padded_IV = torch.nn.functional.pad(score_RV[place_I], (0, 1))
        part_IC = torch.where(is_own_IC, padded_IV.gather(1, column_IC), 0.0)
        score_IC = vocab.ranks.all_reduce(part_IC, "verify")
        self._apart = dict(zip(rows, score_IC, strict=True))
        padded_IV.scatter_(1, column_IC, float("-inf"))
        return score_RV.index_copy(0, place_I, padded_IV[:, :-1])


def _position_keys(
    state: State, sequences: list[Sequence], tree: Tree, counts: list[int]
) -> list[int]:
    """The noise key of the token behind every packed row."""
    assert state.sampler is not None
    found = []
    depths = tree.depth_BN.tolist()
    for sequence, row, count in zip(sequences, depths, counts, strict=True):
        key = state.sampler.keys[sequence.index]
        for depth in [0, *row[:count]]:
            found.append(position_key(key, Purpose.TOKEN, sequence.length + depth))
    return found
