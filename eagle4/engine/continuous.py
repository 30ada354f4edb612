"""Many prompts through few rows: plain decoding with continuous batching.

A finished row is given the next prompt at once, so the batch stays full however different the
lengths of the answers are. Every row owns ``capacity`` consecutive slots, so that attention reads
all rows as one view.

What a job is answered depends on the job alone (its tokens, settings and seed), never on its
neighbours: greedy jobs get plain greedy decoding's tokens, sampled ones those of plain coupled
sampling with the same seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from ..cache import KVPool
from ..noise import Purpose, gumbel, position_key, stream_key
from ..parallel import VocabShard
from ..target import TargetAdapter
from .repetition import Repetition
from .row_steps import prompt_step, token_step

PREFILL_ROWS = 512  # prompt tokens of one prefill forward, at least one prompt


class Sampling(NamedTuple):
    """How tokens are drawn; ``temperature`` 0 is greedy, ``top_k`` 0 the whole vocabulary."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class Job(NamedTuple):
    """A prompt to be answered with at most ``max_new_tokens`` tokens.

    The answer also ends after ``max_repeated`` tokens of `Repetition` (0: never).
    """

    id: str
    ids: list[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    max_repeated: int = 0


@dataclass
class _Row:
    job: Job
    kv_length: int = 0
    answer: list[int] = field(default_factory=list)
    repetition: Repetition = field(default_factory=Repetition)

    def add(self, token: int) -> bool:
        """Append a token; whether the answer ends with it, but for the ids that end any answer."""
        self.answer.append(token)
        # The repetition is only followed where it ends something.
        is_loop = 0 < self.job.max_repeated <= self.repetition.add(token)
        return is_loop or len(self.answer) == self.job.max_new_tokens

    @property
    def key(self) -> int:
        """Of the noise at the next token's position."""
        position = len(self.job.ids) + len(self.answer)
        return position_key(stream_key(self.job.seed, 0), Purpose.TOKEN, position)


@torch.no_grad()
def answer_all(
    target: TargetAdapter,
    jobs: Iterable[Job],
    *,
    ends: Sequence[int] = (),
    num_rows: int = 96,
    capacity: int = 1280,
) -> Iterator[tuple[Job, list[int]]]:
    """Answers in the order in which they finish; each ends with an id of ``ends`` or at its limit.

    ``capacity``: tokens of the longest prompt plus answer. Jobs are taken one at a time, when a row
    is free. Raises `ValueError` for an empty prompt or a job that does not fit.

    All ranks of a split target call this; jobs and sizes are those of rank 0, whatever the others
    give. What their rows have in common is exchanged as in `choices`.
    """
    waiting = iter(jobs)
    if target.vocab is not None:
        ranks = target.vocab.ranks
        num_rows, capacity = ranks.first([num_rows, capacity])
        waiting = ranks.follow(waiting)
    batch = _Batch(target, num_rows, capacity, frozenset(ends))
    with target.attached(with_taps=False):
        while True:
            yield from batch.fill(waiting)
            if not batch.rows:
                return
            yield from batch.step()


class _Batch:
    """The rows that are being answered, by their place in the pool."""

    def __init__(self, target: TargetAdapter, num_rows: int, capacity: int, ends: frozenset[int]):
        if num_rows < 1 or capacity < 2:
            raise ValueError(f"need num_rows >= 1, capacity >= 2; got {num_rows} and {capacity}")
        self.target, self.capacity, self.ends = target, capacity, ends
        self.rows: dict[int, _Row] = {}
        self.free = deque(range(num_rows))
        self.num_rows = num_rows
        self.pool = KVPool()
        self.pool.resize(num_rows * capacity)

    def fill(self, waiting: Iterator[Job]) -> Iterator[tuple[Job, list[int]]]:
        """Give free rows their prompts, together up to `PREFILL_ROWS` tokens per forward."""
        exhausted = False
        while self.free and not exhausted:
            placed: dict[int, _Row] = {}
            while self.free and sum(len(r.job.ids) for r in placed.values()) < PREFILL_ROWS:
                job = next(waiting, None)
                if job is None:
                    exhausted = True
                    break
                self._check(job)
                placed[self.free.popleft()] = _Row(job)
            if placed:
                yield from self._prefill(placed)

    def _check(self, job: Job) -> None:
        room = self.capacity - len(job.ids)
        if not job.ids or job.max_new_tokens < 1 or job.max_new_tokens > room:
            raise ValueError(
                f"prompt {job.id} has {len(job.ids)} tokens and asks for {job.max_new_tokens} new "
                f"ones; a prompt needs at least one, and both must fit into {self.capacity}"
            )

    def _prefill(self, placed: dict[int, _Row]) -> Iterator[tuple[Job, list[int]]]:
        lengths = [len(row.job.ids) for row in placed.values()]
        device = self.target.device
        token_R = torch.tensor([t for row in placed.values() for t in row.job.ids], device=device)
        step = prompt_step(list(placed), lengths, self.capacity, device)
        keep = torch.tensor(lengths, device=device).cumsum(0) - 1
        out = self.target.forward(token_R, step, self.pool, keep)
        for row, length in zip(placed.values(), lengths, strict=True):
            row.kv_length = length
        self.rows |= placed
        yield from self._append(placed, out.logits_RV)

    def step(self) -> Iterator[tuple[Job, list[int]]]:
        """One token more for every row."""
        if not self.rows:
            return
        places, device = sorted(self.rows), self.target.device
        rows = {place: self.rows[place] for place in places}
        token_R = torch.tensor([row.answer[-1] for row in rows.values()], device=device)
        kv_length_B = torch.tensor([row.kv_length for row in rows.values()], device=device)
        step = token_step(places, kv_length_B, self.num_rows, self.capacity)
        out = self.target.forward(token_R, step, self.pool)
        for place, row in rows.items():
            if self.pool.recurrent is not None:
                self.pool.recurrent.commit(place, [0])
            row.kv_length += 1
        yield from self._append(rows, out.logits_RV)

    def _append(
        self, rows: dict[int, _Row], logits_RV: torch.Tensor
    ) -> Iterator[tuple[Job, list[int]]]:
        tokens = draw(list(rows.values()), logits_RV, self.target.vocab)
        for place, token in zip(rows, tokens, strict=True):
            row = rows[place]
            if row.add(token) or token in self.ends:
                del self.rows[place]
                self.free.append(place)
                yield row.job, row.answer


def draw(
    rows: Sequence[_Row], logits_RV: torch.Tensor, vocab: VocabShard | None = None
) -> list[int]:
    """The next token of every row; rows with equal settings are drawn together.

    ``vocab``: the logits are one rank's columns.
    """
    token_R = logits_RV.argmax(dim=-1) if vocab is None else vocab.best(logits_RV)[1]
    # Sorted, so that all ranks go through them in one order.
    for sampling in sorted({row.job.sampling for row in rows if row.job.sampling.temperature}):
        index = [i for i, row in enumerate(rows) if row.job.sampling == sampling]
        key_R1 = torch.tensor([[rows[i].key] for i in index], device=logits_RV.device)
        token_R[index] = _draw_alike(sampling, key_R1, logits_RV[index].float(), vocab)
    if vocab is not None:
        token_R = vocab.ranks.broadcast(token_R, "verify")
    return token_R.tolist()


def _draw_alike(
    sampling: Sampling, key_R1: torch.Tensor, score_RV: torch.Tensor, vocab: VocabShard | None
) -> torch.Tensor:
    """argmax(score + g), where a law's scores may all be off by one constant."""
    if vocab is not None and (sampling.top_k or sampling.top_p < 1.0):
        score_RV, vocab = vocab.rows(score_RV, sampling.top_k), None
    vocab_size, device = score_RV.shape[-1], score_RV.device
    if 0 < sampling.top_k < vocab_size:
        score_RC, token_RC = score_RV.topk(sampling.top_k, dim=-1)
    else:
        token_V = (
            torch.arange(vocab_size, device=device) if vocab is None else vocab.token_ids(device)
        )
        score_RC, token_RC = score_RV, token_V.expand(score_RV.shape)
    score_RC = _warpers(sampling)(token_RC, score_RC).double()  # type: ignore[arg-type]
    noisy_RC = score_RC + gumbel(key_R1, token_RC)
    if vocab is not None:
        return vocab.best(noisy_RC)[1]
    return token_RC.gather(1, noisy_RC.argmax(dim=-1, keepdim=True))[:, 0]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList([hf.TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(sampling.top_p))
    return warpers
