"""`VocabShard`: logits of which every rank holds the columns of its own tokens.

Choosing the best token of a row takes one (score, id) pair per rank, not a row of scores. Ranks
hold ascending runs of ids and ties go to the first rank, and inside a rank to the first column, so
a tie goes to the lowest id, as in `torch.argmax` over the whole row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .linear import gather_last, share_of, split_outputs
from .ranks import Ranks

SPARE = 8  # entries beyond k that `top_rows` asks of every rank, in case of ties


class VocabShard:
    """This rank's run of token ids, ``first .. last - 1`` of ``size``."""

    def __init__(self, ranks: Ranks, size: int):
        self.ranks = ranks
        self.share = share_of(size, ranks)
        self.first, self.last, self.size = self.share
        self.step = -(-size // ranks.size)  # ids of every rank but perhaps the last
        # Rounds that asked for tokens, and the bytes that gathering their rows would have taken.
        self.asked: Counter[str] = Counter()
        self._gathers = True

    def token_ids(self, device: torch.device) -> torch.Tensor:
        """This rank's ids, ascending."""
        return torch.arange(self.first, self.last, device=device)

    # -- the head --------------------------------------------------------------------------------

    def split_head(self, head: nn.Linear) -> None:
        """Keep the rows of this rank's tokens."""
        split_outputs(head, self.share)

    def gather_outside(self, head: nn.Module) -> None:
        """Full logits for whoever calls the model, except inside `local`."""

        def joined(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            return self.full(output) if self._gathers else output

        head.register_forward_hook(joined)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, the head gives this rank's columns only."""
        before, self._gathers = self._gathers, False
        try:
            yield
        finally:
            self._gathers = before

    # -- rows ------------------------------------------------------------------------------------

    def ask(self, logits_RV: torch.Tensor) -> None:
        """Note that a choice is due behind these rows."""
        whole = len(logits_RV) * self.step * logits_RV.element_size()
        self.asked.update(rounds=1, whole_bytes=whole)

    def full(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Whole rows ``[..., V]`` on every rank."""
        return gather_last(logits_RV, self.share, self.ranks, "rows")

    def best(self, score_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest score of every row and its token: float64 ``[R]``, int64 ``[R]``.

        NaN counts as the largest, as in `torch.argmax`.
        """
        return first_best(self.ranks.all_gather(self.local_best(score_RV), "verify"))

    def local_best(self, score_RV: torch.Tensor) -> torch.Tensor:
        """This rank's (score, id) of every row: float64 ``[R, 2]``, which holds both exactly."""
        index_R1 = score_RV.argmax(dim=-1, keepdim=True)
        value_R1 = score_RV.gather(-1, index_R1)
        return torch.cat([value_R1.double(), (index_R1 + self.first).double()], dim=-1)

    def rows(self, logits_RV: torch.Tensor, top_k: int = 0) -> torch.Tensor:
        """Whole rows; with ``top_k``, -inf may stand where that filter puts it anyway."""
        found = self.top_rows(logits_RV, top_k) if top_k else None
        return self.full(logits_RV) if found is None else found

    def top_rows(self, logits_RV: torch.Tensor, k: int) -> torch.Tensor | None:
        """Whole float32 rows in which all but a superset of the k best scores are -inf.

        Every score that is not below the k-th best is kept, as top-k filters keep ties. None when a
        rank holds more ties than it could send; all ranks see that alike.
        """
        count = min(k + SPARE, self.step)
        value_RC, index_RC = logits_RV.float().topk(min(count, self.share.size), dim=-1)
        pad = (0, count - value_RC.shape[1])
        value_RC = nn.functional.pad(value_RC, pad, value=float("-inf"))
        # Padding falls into a column of its own. Ids are exact in float32.
        index_RC = nn.functional.pad(index_RC + self.first, pad, value=self.size)
        found = self.ranks.all_gather(torch.stack([value_RC, index_RC.float()], -1), "verify")
        value_WRC, token_WRC = found[..., 0], found[..., 1].long()
        all_RC = value_WRC.movedim(0, 1).flatten(1)
        threshold_R1 = all_RC.topk(min(k, all_RC.shape[1]), dim=-1).values[:, -1:]
        if count < self.step and bool((value_WRC[..., -1] >= threshold_R1.squeeze(1)).any()):
            return None
        shape = len(logits_RV), self.size + 1
        row_RV = torch.full(shape, float("-inf"), device=logits_RV.device)
        row_RV.scatter_(1, token_WRC.movedim(0, 1).flatten(1), all_RC)
        return row_RV[:, : self.size]


def first_best(pair_WR2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of every rank's (score, id) pairs per row; the first rank's among equals."""
    value_WR, token_WR = pair_WR2.unbind(-1)
    owner_1R = value_WR.argmax(dim=0, keepdim=True)
    value_R, token_R = (rows.gather(0, owner_1R).squeeze(0) for rows in (value_WR, token_WR))
    return value_R, token_R.long()
