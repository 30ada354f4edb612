"""What goes into one generation, comes out of it, and is carried from round to round."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..harness import Policy
from ..target import TargetAdapter
from .drafting import Draft
from .output import Recorder, Streamer
from .prefix import Eagle4Cache
from .sampler import Sampler
from .state import State
from .stats import SpeculationStats

# Transformers 5.24 renamed past_key_values to cache in forwards, outputs and generate.
CACHE_KEYWORD = (
    "cache"
    if "cache" in inspect.signature(GenerateDecoderOnlyOutput).parameters
    else "past_key_values"
)
_OUTPUTS = ("sequences", "scores", "logits", "hidden_states")


class Eagle4Output(GenerateDecoderOnlyOutput):
    """Transformers' decoder-only output plus ``speculation`` (`SpeculationStats`)."""

    speculation: SpeculationStats | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One `generate` call after Transformers has prepared it.

    ``input_ids [B, P]`` with ``pads`` left-padding columns per row, the first ``known`` columns
    taken from ``cache``; ``max_length`` counts all of them and the new tokens; ``pads_finished``: a
    finished row gets padding (Transformers pads only when an EOS is configured, otherwise rows run
    on until the last one stops).
    """

    input_ids: torch.Tensor
    pads: list[int]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    max_length: int
    pad_token: int
    pads_finished: bool
    sampler: Sampler | None = None
    max_position: int | None = None
    streamer: object | None = None
    cache: Eagle4Cache | None = None
    known: int = 0
    output_scores: bool = False
    output_logits: bool = False
    output_hidden_states: bool = False


@dataclass
class Result:
    """Token ids ``[B, P - known + new]`` and what was asked for beside them."""

    sequences: torch.Tensor
    cache: Eagle4Cache
    stats: SpeculationStats
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    hidden_states: tuple[tuple[torch.Tensor, ...], ...] | None = None

    def as_output(self, with_cache: bool) -> Eagle4Output:
        """For `generate` with ``return_dict_in_generate``."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _OUTPUTS}
        fields[CACHE_KEYWORD] = self.cache if with_cache else None
        out = Eagle4Output(**fields)
        out.speculation = self.stats
        return out


@dataclass
class Call:
    """Everything that one call carries from round to round."""

    request: Request
    target: TargetAdapter
    policy: Policy | None
    draft: Draft | None
    state: State
    recorder: Recorder
    streamer: Streamer
    processors: list[LogitsProcessorList]
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def result(self) -> Result:
        """What the call hands back: padded ids and everything that was recorded."""
        state, recorder = self.state, self.recorder
        total = state.prompt_length + max(s.new_tokens for s in state.sequences)
        ids = state.ids_BT.new_full((len(state.sequences), total), state.pad_token)
        for sequence in state.sequences:
            columns = sequence.pad + sequence.length
            ids[sequence.index, :columns] = state.ids_BT[sequence.index, :columns]
        return Result(
            sequences=ids[:, state.known :],
            cache=self.request.cache or Eagle4Cache(state),
            stats=self.stats,
            scores=recorder.stacked(recorder.scores),
            logits=recorder.stacked(recorder.logits),
            hidden_states=recorder.stacked_hidden(),
        )
