"""One call on several ranks: asked the same thing, seeded alike, stopped alike, spoken for by one.

Everything that happens between here and the result is derived from bits that all ranks share. What
is left are the things that a call brings along: a seed nobody gave, clocks, and users' criteria.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from ..config import SpeculativeConfig
from ..drafter import Eagle4Drafter
from ..drafter.sharded import shard_drafter
from ..parallel import RankError, Ranks, VocabShard, shard_target
from ..target import TargetAdapter
from .call import Request

# Functions of the token ids alone.
_PURE = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def split(target: TargetAdapter, drafter: Eagle4Drafter | None, ranks: Ranks) -> None:
    """Keep this rank's share of both models. Raises `ValueError` for those that do not divide.

    The adapter is there already, because a family that has to be probed is probed as a whole.
    """
    vocab = shard_target(target.model, ranks)
    if drafter is not None:
        shard_drafter(drafter, vocab)
    target.share(vocab)


def agree(
    request: Request,
    config: SpeculativeConfig | None,
    generation_config: GenerationConfig,
    vocab: VocabShard | None,
) -> Request:
    """The request as all ranks run it: with rank 0's seed where the caller gave none.

    On one process (no ``vocab``) it stays as it is. Raises `ValueError` on every rank when they
    were not asked the same thing.
    """
    if vocab is None:
        return request
    sampler = request.sampler
    keys = [] if sampler is None else sampler.keys
    has_seed = sampler is None or getattr(generation_config, "seed", None) is not None
    asked = _description(request), config and {**dataclasses.asdict(config), "profile": None}
    digest = hashlib.sha256(repr((asked, has_seed and keys)).encode()).hexdigest()
    found = vocab.ranks.gather_objects((digest, keys))
    if others := [rank for rank, (other, _) in enumerate(found) if other != found[0][0]]:
        raise ValueError(
            f"ranks {others} were asked something else than rank 0; under tensor parallelism every "
            "rank calls generate with the same arguments"
        )
    if sampler is not None:
        sampler.keys = found[0][1]
    criteria = StoppingCriteriaList(
        c if type(c) in _PURE else FirstRankDecides(c, vocab) for c in request.criteria
    )
    return dataclasses.replace(request, criteria=criteria)


def _description(request: Request) -> list[Any]:
    """What must be the same on all ranks, as values whose text is the same as well."""
    return [
        request.input_ids.tolist(),
        *(request.pads, request.max_length, request.known, request.pads_finished),
        *(request.output_scores, request.output_logits, request.output_hidden_states),
        [_settings(part) for part in (*request.processors, *request.criteria)],
    ]


def _settings(part: Any) -> tuple[str, dict[str, Any]]:
    """The kind of a processor or criterion and, if it is Transformers' own, its numbers."""
    is_own = type(part).__module__.startswith("transformers.")
    values = vars(part) if is_own and not isinstance(part, MaxTimeCriteria) else {}
    return type(part).__name__, {k: v for k, v in values.items() if isinstance(v, int | float)}


class FirstRankDecides(StoppingCriteria):
    """A criterion that looks at more than the ids, for example a clock: rank 0's answer counts."""

    def __init__(self, criterion: Any, vocab: VocabShard):
        self.criterion, self.vocab = criterion, vocab

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        answer = torch.as_tensor(self.criterion(input_ids, scores, **kwargs))
        answer = answer.to(input_ids.device).expand(len(input_ids)).to(torch.int32)
        return self.vocab.ranks.broadcast(answer).bool()


class Silent(BaseStreamer):
    """The streamer of every rank but the first."""

    def put(self, value: torch.Tensor) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


@contextmanager
def counted(vocab: VocabShard | None) -> Iterator[dict[str, Any] | None]:
    """Fills a report with the bytes that this rank sends inside; None on one process.

    ``sums`` is what adds up the parts of layers: "gloo", "nccl" or "one-shot" (small parts).
    ``verify_bytes_per_round`` is what choosing tokens took, ``whole_bytes_per_round`` what
    gathering the logits of the same rows would have taken; prefills count as rounds. An error that
    gets out of here left the ranks at different points, so this one leaves.
    """
    if vocab is None:
        yield None
        return
    ranks, report = vocab.ranks, {}
    ranks.sent_bytes.clear()
    vocab.asked.clear()
    try:
        yield report
    except RankError:
        raise
    except BaseException:
        ranks.leave()
        raise
    sent, rounds = dict(ranks.sent_bytes), max(vocab.asked["rounds"], 1)
    report |= {
        "ranks": ranks.size,
        "sums": ranks.sums,
        "bytes": sent,
        "verify_bytes_per_round": (sent.get("verify", 0) + sent.get("rows", 0)) / rounds,
        "whole_bytes_per_round": vocab.asked["whole_bytes"] / rounds,
    }
