"""How a call draws: seeds, shared noise, and what earlier rounds say about the drafter's draws."""

from __future__ import annotations

import operator
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ..noise import Purpose, gumbel, position_key, stream_key
from ..sampling import Choose, context_free, draft_law
from ..types import Candidates, Drawn
from ..verify import choose_coupled, choose_rejection
from .state import Sequence

if TYPE_CHECKING:
    from .shared_rows import SharedRows

# How much a coupled candidate's lead in log q + g says about the target's choice; see `rank`.
SHARPNESS = 0.5


class Sampler:
    """Draws for every row of one call; row b's noise is keyed by ``keys[b]``."""

    def __init__(self, keys: list[int], warpers: LogitsProcessorList):
        self.keys = keys
        self.warpers = warpers
        self.ranks = RankAcceptance()

    def choose(
        self,
        sequence: Sequence,
        drawn: Drawn | None = None,
        b: int = 0,
        shared: SharedRows | None = None,
    ) -> Choose:
        """What picks the token behind a verified row of tree ``b``.

        Children that were drawn are put to the acceptance test. Anything else is coupled: the
        token depends on the seed and its position alone. ``shared`` stands in for rows of scores.
        """
        key = self.keys[sequence.index]

        def coupled(row: int, depth: int, score_V: torch.Tensor) -> torch.Tensor:
            if shared is not None:
                return shared.token(b, row)
            return choose_coupled(score_V, key, sequence.length + depth)

        if drawn is None:
            return coupled
        tree, law = drawn

        def rejection(row: int, depth: int, score_V: torch.Tensor) -> torch.Tensor:
            is_child_N = (tree.parent_BN[b] == row - 1) & (tree.depth_BN[b] > 0)
            child_K = tree.token_BN[b][is_child_N]
            if not len(child_K):
                return coupled(row, depth, score_V)
            asked = key, sequence.length + depth, child_K, law.token_BRC[b, row]
            logq_C = law.logp_BRC[b, row]
            if shared is not None:
                token, refused = shared.reject(b, row, *asked, logq_C)
            else:
                token, refused = choose_rejection(score_V, *asked, logq_C)
            self.ranks.record(depth, refused, len(child_K))
            return token

        return rejection

    def law(self, candidates: Candidates) -> Candidates:
        """q: the candidates under this call's context-free warpers."""
        return draft_law(self.warpers, candidates)

    def noise(
        self, purpose: Purpose, sequences: list[Sequence], depth: int, token_RC: torch.Tensor
    ) -> torch.Tensor:
        """Gumbel noise of candidates ``depth`` behind the roots; rows are grouped by sequence."""
        positions = [sequence.length - 1 + depth for sequence in sequences]
        keys = [
            position_key(self.keys[sequence.index], purpose, position)
            for sequence, position in zip(sequences, positions, strict=True)
        ]
        key_B11 = torch.tensor(keys, device=token_RC.device).view(-1, 1, 1)
        return gumbel(key_B11, token_RC.unflatten(0, (len(sequences), -1))).flatten(0, 1)

    def rank(
        self, candidates: Candidates, sequences: list[Sequence], depth: int, top_k: int
    ) -> Candidates:
        """The ``top_k`` candidates that the target will most likely choose, given the noise.

        The target takes argmax(log p + g). Were log p = log q + e with e Gumbel noise of scale
        1 / `SHARPNESS`, its choice would follow softmax(SHARPNESS * (log q + g)): that is what is
        reported as log-probability, so trees grow where the shared noise points.
        """
        token_RC, logq_RC = self.law(candidates)
        key_RC = logq_RC + self.noise(Purpose.TOKEN, sequences, depth, token_RC)
        chance_RC = (SHARPNESS * key_RC).log_softmax(dim=-1)
        chance_RK, index_RK = chance_RC.topk(min(top_k, chance_RC.shape[-1]), dim=-1)
        return Candidates(token_RC.gather(-1, index_RK), chance_RK.float())


class RankAcceptance:
    """How often the r-th draw was accepted where its elder siblings had failed, by depth.

    A prior counts as `STRENGTH` trials, so a call starts with a sensible shape and soon has its
    own. Only verdicts of earlier rounds enter, never the draws that a shape is chosen for.
    """

    STRENGTH = 12.0
    PRIOR = (0.55, 0.25, 0.2, 0.15)  # ranks beyond the last have its value

    def __init__(self):
        self._tried: Counter[tuple[int, int]] = Counter()
        self._accepted: Counter[tuple[int, int]] = Counter()

    def record(self, depth: int, refused: int, children: int) -> None:
        """One tested row ``depth`` behind the root, whose first ``refused`` children failed."""
        for rank in range(min(refused + 1, children)):
            self._tried[depth, rank] += 1
        if refused < children:
            self._accepted[depth, refused] += 1

    def table(self, max_depth: int, top_k: int) -> list[list[float]]:
        """``[d][r]``: chance that the child of rank r is the accepted one at depth d + 1."""
        return [self._row(depth, top_k) for depth in range(max_depth)]

    def _row(self, depth: int, top_k: int) -> list[float]:
        row, left = [], 1.0
        for rank in range(top_k):
            prior = self.PRIOR[min(rank, len(self.PRIOR) - 1)]
            accepted = self._accepted[depth, rank] + self.STRENGTH * prior
            rate = accepted / (self._tried[depth, rank] + self.STRENGTH)
            row.append(left * rate)
            left *= 1.0 - rate
        return row


def check_seed(seed: Any) -> int | list[int] | None:
    """A seed, one per returned sequence, or None. Raises `ValueError` for anything else."""
    if seed is None:
        return None
    if isinstance(seed, list | tuple):
        return [_checked(value) for value in seed]
    return _checked(seed)


def _checked(seed: Any) -> int:
    try:
        value = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        value = None
    # The range of torch.manual_seed.
    if value is None or not -(1 << 63) <= value < 1 << 64:
        raise ValueError(
            f"seed={seed!r} is not understood; pass an integer of 64 bits, a list with one for "
            "every returned sequence, or None to draw one from torch's default generator"
        )
    return value


def make_sampler(
    generation_config: GenerationConfig, processors: LogitsProcessorList, batch: int
) -> Sampler | None:
    """The sampler of a prepared call; None for greedy decoding.

    One seed gives row b the stream b; a list gives every row stream 0 of its own seed, so that a
    row of a batch draws what it draws alone. Raises `ValueError` for a list of the wrong length.
    """
    if not generation_config.do_sample:
        return None
    seed = check_seed(getattr(generation_config, "seed", None))
    if isinstance(seed, list):
        if len(seed) != batch:
            raise ValueError(
                f"seed has {len(seed)} entries but {batch} sequences are returned; pass one for "
                "each, or a single integer"
            )
        keys = [stream_key(value, 0) for value in seed]
    else:
        if seed is None:
            seed = int(torch.randint(torch.iinfo(torch.int64).max, ()))
        keys = [stream_key(seed, row) for row in range(batch)]
    return Sampler(keys, context_free(processors))
