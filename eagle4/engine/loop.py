"""The generation loop: prefill, then rounds until every row has stopped.

The loop asks the policy for a plan, the draft for a tree and the reference round for a verdict, and
commits. Whatever goes wrong on the draft side ends speculation, never the request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from ..harness import Policy
from ..sampling import for_sequence
from ..target import TargetAdapter
from ..types import Plan, Tree
from .commit import commit_cache, commit_tokens
from .drafting import Draft
from .output import Recorder, Streamer
from .prefix import Eagle4Cache, resume
from .reference import Verified, empty_tree, prefill, verify
from .state import Sequence, State
from .stats import SpeculationStats

logger = logging.getLogger("eagle4")
PLAIN = Plan(speculative=False, max_depth=0, top_k=1, max_nodes=0)


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


@dataclass
class _Run:
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


@torch.no_grad()
def run(
    request: Request, target: TargetAdapter, policy: Policy | None = None, draft: Draft | None = None
) -> Result:
    """Generate greedily. Without ``draft`` every round is plain: one row per sequence."""
    state = State(request.input_ids, request.pads, request.pad_token, request.known)
    if request.cache is not None:
        resume(request.cache, state, needs_features=draft is not None)
    batch = len(state.sequences)
    call = _Run(
        request=request,
        target=target,
        policy=policy,
        draft=draft,
        state=state,
        recorder=Recorder(
            state, request.output_scores, request.output_logits, request.output_hidden_states
        ),
        streamer=Streamer(request.streamer, state, request.pads_finished),
        processors=[for_sequence(request.processors, b, batch) for b in range(batch)],
    )
    with target.attached(with_taps=draft is not None):
        _generate(call)
    return _result(call)


def _generate(call: _Run) -> None:
    state = call.state
    for sequence in state.sequences:
        _reserve(call, sequence)
    for sequence in state.sequences:
        _prefill(call, sequence)
    call.streamer.flush()
    while live := _live(call):
        _round(call, live)
        call.streamer.flush()


def _live(call: _Run) -> list[Sequence]:
    """Rows that still need tokens.

    Without an EOS, Transformers keeps decoding finished rows until the last one stops; those rows
    run on to the same length.
    """
    rows = call.state.sequences
    running = [s for s in rows if not s.done]
    if running or call.request.pads_finished:
        return running
    longest = max(s.new_tokens for s in rows)
    return [s for s in rows if s.new_tokens < longest]


def _reserve(call: _Run, sequence: Sequence) -> None:
    """Contiguous room for the whole request where that is small enough to be worth it."""
    most = call.request.max_length - sequence.pad + 64
    call.state.reserve(sequence, most if most <= 4096 else sequence.length + 512)


def _prefill(call: _Run, sequence: Sequence) -> None:
    stats, state = call.stats, call.state
    with stats.stage("prefill"):
        logits_RV, hidden, calls = prefill(
            state, sequence, call.target, call.request.output_hidden_states
        )
    stats.target_calls += calls
    call.recorder.add_prompt(sequence, hidden)
    history = state.history(sequence).unsqueeze(0)
    scores_RV = logits_RV.to(dtype=torch.float32, copy=True)
    scores_RV = call.processors[sequence.index](history, scores_RV)
    _commit(call, sequence, [int(scores_RV[0].argmax())], scores_RV, [])
    call.recorder.add_rows(sequence, torch.tensor([0]), logits_RV, None)


def _round(call: _Run, sequences: list[Sequence]) -> None:
    state, stats = call.state, call.stats
    limits = [_depth_limit(call, sequence) for sequence in sequences]
    tree = _draft(call, sequences, limits)
    speculative = tree is not None
    if tree is None:
        tree = empty_tree(len(sequences), state.device)
    with stats.stage("verify"):
        verified = verify(
            state,
            sequences,
            tree,
            call.target,
            call.processors,
            call.request.output_hidden_states,
        )
    stats.rounds += 1
    stats.target_calls += 1
    stats.plain_rounds += not speculative
    with stats.stage("commit"):
        accepted = [
            _commit_verdict(call, sequence, b, tree, verified, speculative)
            for b, sequence in enumerate(sequences)
        ]
    stats.accepted_per_round.append(accepted)


def _depth_limit(call: _Run, sequence: Sequence) -> int:
    """Nodes deeper than this could never be committed: the bonus fills the last place."""
    room = call.request.max_length - (sequence.pad + sequence.length) - 1
    if call.request.max_position is not None:
        room = min(room, call.request.max_position - sequence.length)
    return max(room, 0)


def _draft(call: _Run, sequences: list[Sequence], limits: list[int]) -> Tree | None:
    """The round's tree, or None for a plain round."""
    if call.draft is None or call.policy is None or max(limits) == 0:
        return None
    plan = call.policy.plan(len(sequences))
    if not plan.speculative:
        return None
    try:
        if any(s.draft_length + s.num_pending < s.length - 1 for s in sequences):
            raise RuntimeError("the target's taps did not reach the drafter")
        with call.stats.stage("draft"):
            tree = call.draft(call.state, sequences, plan, limits, call.stats)
    except Exception as error:  # speculation is an optimisation, never a dependency
        reason = f"{type(error).__name__}: {error}"
        if not call.stats.fallbacks:
            logger.warning("drafting failed, decoding goes on without speculation: %s", reason)
        call.stats.fallbacks[reason] += 1
        call.draft = None
        call.state.forget_drafts()
        return None
    call.stats.nodes_verified += int(tree.count_B.sum())
    return tree


def _commit_verdict(
    call: _Run, sequence: Sequence, b: int, tree: Tree, verified: Verified, speculative: bool
) -> int:
    """Commit one row's verdict; returns how many drafted nodes were kept."""
    verdict = verified.verdict
    length = int(verdict.length_B[b])
    path = verdict.path_BS[b, :length].tolist()
    tokens = [int(tree.token_BN[b, node]) for node in path] + [int(verdict.bonus_B[b])]
    rows = [0] + [node + 1 for node in path]
    kept = _commit(call, sequence, tokens, verified.scores[b][rows], rows)
    packed = torch.tensor(rows[:kept], device=call.state.device) + verified.first_row[b]
    features = verified.output.features_RTH if call.draft is not None else None
    commit_cache(call.state, sequence, rows[:kept], None if features is None else features[packed])
    output = verified.output
    call.recorder.add_rows(sequence, packed, output.logits_RV, output.hidden_states)
    if speculative:
        depths = tree.depth_BN[b]
        call.stats.record(int(depths.max()) if len(depths) else 0, length, kept)
    return min(length, kept)


def _commit(
    call: _Run, sequence: Sequence, tokens: list[int], scores_RV: torch.Tensor, rows: list[int]
) -> int:
    """Commit tokens under the stop rules; a row that only runs on ignores them."""
    scores = call.recorder.scores
    own = None if scores is None else scores[sequence.index]
    criteria = call.request.criteria
    if sequence.done:
        longest = max(s.new_tokens for s in call.state.sequences)
        tokens, criteria = tokens[: longest - sequence.new_tokens], StoppingCriteriaList()
    kept = commit_tokens(call.state, sequence, tokens, criteria, own, scores_RV)
    call.stats.new_tokens += kept
    return kept


def _result(call: _Run) -> Result:
    state, recorder = call.state, call.recorder
    steps = max(s.new_tokens for s in state.sequences)
    total = state.prompt_length + steps
    ids = state.ids_BT.new_full((len(state.sequences), total), state.pad_token)
    for sequence in state.sequences:
        columns = sequence.pad + sequence.length
        ids[sequence.index, :columns] = state.ids_BT[sequence.index, :columns]
    cache = call.request.cache or Eagle4Cache(state)
    return Result(
        sequences=ids[:, state.known :],
        cache=cache,
        stats=call.stats,
        scores=recorder.stacked(recorder.scores),
        logits=recorder.stacked(recorder.logits),
        hidden_states=recorder.stacked_hidden(),
    )
