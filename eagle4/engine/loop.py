"""The generation loop: prefill, then rounds until every row has stopped.

The loop asks the policy for a plan, the draft for a tree and the reference round for a verdict, and
commits. Whatever goes wrong on the draft side ends speculation, never the request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import StoppingCriteriaList

from ..harness import Policy
from ..sampling import for_sequence
from ..target import TargetAdapter
from ..types import Drawn, Law, Tree
from .call import Call, Request, Result
from .choices import choose_tokens
from .commit import commit_cache, commit_tokens
from .drafter_rows import DraftError
from .drafting import Draft
from .fallback import is_out_of_memory, stop_speculating
from .graphs import EAGER, Graphs
from .output import Recorder, Streamer
from .plans import before_round, load_of, report_round
from .prefix import resume
from .reference import Verified, empty_tree, prefill, verify
from .state import Sequence, State


class _Trees(NamedTuple):
    """A round's trees; ``nodes``: what the host knows of them, (token, depth) per node."""

    tree: Tree
    law: Law | None
    nodes: list[list[tuple[int, int]]]


@torch.no_grad()
def run(
    request: Request,
    target: TargetAdapter,
    policy: Policy | None = None,
    draft: Draft | None = None,
    graphs: Graphs = EAGER,
) -> Result:
    """Generate. Without ``draft`` every round is plain: one row per sequence."""
    state = State(
        request.input_ids, request.pads, request.pad_token, request.known, request.sampler, graphs
    )
    state.needs_rows = request.output_scores or request.output_logits
    if request.cache is not None:
        resume(request.cache, state, needs_features=draft is not None)
    batch = len(state.sequences)
    call = Call(
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
    with target.attached(with_taps=draft is not None, run_blocks=graphs.blocks):
        _generate(call)
    return call.result()


def _generate(call: Call) -> None:
    state = call.state
    for sequence in state.sequences:
        _reserve(call, sequence)
    for sequence in state.sequences:
        _prefill(call, sequence)
    call.streamer.flush()
    while live := _live(call):
        _round(call, live)
        call.streamer.flush()


def _live(call: Call) -> list[Sequence]:
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


def _reserve(call: Call, sequence: Sequence) -> None:
    """Contiguous room for the whole request where that is small enough to be worth it."""
    most = call.request.max_length - sequence.pad + 64
    call.state.reserve(sequence, most if most <= 4096 else sequence.length + 512)


def _prefill(call: Call, sequence: Sequence) -> None:
    stats, state = call.stats, call.state
    with stats.stage("prefill"):
        logits_RV, hidden, calls = prefill(
            state, sequence, call.target, call.request.output_hidden_states
        )
    stats.target_calls += calls
    call.recorder.add_prompt(sequence, hidden)
    chosen = choose_tokens(
        state,
        [sequence],
        empty_tree(1, state.device),
        None,
        call.processors,
        logits_RV,
        [0],
        call.target.vocab,
    )
    first = stats.read("prefill", chosen.choice_BR[0, :1])
    _commit(call, sequence, first, chosen.scores[0], [])
    call.recorder.add_rows(sequence, torch.tensor([0]), chosen.logits_RV, None)


def _round(call: Call, sequences: list[Sequence]) -> None:
    stats = call.stats
    limits = [_depth_limit(call, sequence) for sequence in sequences]
    before = before_round(call, sequences)
    drafted = _draft(call, sequences, limits)
    plainly = _Trees(empty_tree(len(sequences), call.state.device), None, [[]] * len(sequences))
    try:
        verified = _verify(call, sequences, drafted or plainly)
    except Exception as error:
        if drafted is None or not is_out_of_memory(error):
            raise
        stop_speculating(call, error)
        drafted = None
        verified = _verify(call, sequences, plainly)
    stats.rounds += 1
    stats.target_calls += 1
    stats.plain_rounds += drafted is None
    with stats.stage("commit"):
        accepted = _commit_verdicts(call, sequences, drafted, verified)
    stats.accepted_per_round.append(accepted)
    report_round(call, before, is_planned=max(limits) > 0)


def _verify(call: Call, sequences: list[Sequence], drafted: _Trees) -> Verified:
    """Run the tree, or the roots alone, through the target."""
    tree, law, nodes = drafted
    hidden, counts = call.request.output_hidden_states, [len(row) for row in nodes]
    with call.stats.stage("verify"):
        return verify(
            call.state, sequences, tree, call.target, call.processors, hidden, law, counts
        )


def _depth_limit(call: Call, sequence: Sequence) -> int:
    """Nodes deeper than this could never be committed: the bonus fills the last place."""
    room = call.request.max_length - (sequence.pad + sequence.length) - 1
    if call.request.max_position is not None:
        room = min(room, call.request.max_position - sequence.length)
    return max(room, 0)


def _draft(call: Call, sequences: list[Sequence], limits: list[int]) -> _Trees | None:
    """The round's tree, with its law if it was drawn; or None for a plain round."""
    if call.draft is None or call.policy is None or max(limits) == 0:
        return None
    plan = call.policy.plan(load_of(call, sequences))
    if not plan.speculative:
        return None
    try:
        if any(s.draft_length + s.num_pending < s.length - 1 for s in sequences):
            raise DraftError("the target's taps did not reach the drafter")
        with call.stats.stage("draft"):
            found = call.draft(call.state, sequences, plan, limits, call.stats)
        tree, law = found if isinstance(found, Drawn) else (found, None)
        drafted = _Trees(tree, law, _look(call, tree))
    except Exception as error:  # whatever it is: plain decoding can do without the draft
        stop_speculating(call, error)
        return None
    call.stats.nodes_verified += sum(map(len, drafted.nodes))
    return drafted


def _look(call: Call, tree: Tree) -> list[list[tuple[int, int]]]:
    """Tokens and depths of the nodes. What the target could not embed must not reach it."""
    batch, size = tree.token_BN.shape
    parts = tree.count_B, tree.token_BN.flatten(), tree.depth_BN.flatten()
    found = call.stats.read("nodes", torch.cat(parts))
    pairs = list(
        zip(found[batch : batch + batch * size], found[batch + batch * size :], strict=True)
    )
    nodes = [pairs[b * size : b * size + count] for b, count in enumerate(found[:batch])]
    if any(not 0 <= token < call.target.config.vocab_size for row in nodes for token, _ in row):
        raise DraftError("a drafted token is outside the target's vocabulary")
    return nodes


def _commit_verdicts(
    call: Call, sequences: list[Sequence], drafted: _Trees | None, verified: Verified
) -> list[int]:
    """Commit every row's verdict; returns how many drafted nodes were kept."""
    batch = len(sequences)
    path_BS, length_B, bonus_B = verified.verdict
    found = call.stats.read("verdict", torch.cat([length_B, bonus_B, path_BS.flatten()]))
    accepted, size = [], path_BS.shape[1]
    for b, sequence in enumerate(sequences):
        first, length = 2 * batch + b * size, found[b]
        path = found[first : first + length]
        nodes = drafted.nodes[b] if drafted is not None else []
        tokens = [nodes[node][0] for node in path] + [found[batch + b]]
        kept = _commit_path(call, sequence, b, tokens, [0] + [node + 1 for node in path], verified)
        if drafted is not None:
            call.stats.record(max((depth for _, depth in nodes), default=0), length, kept)
        accepted.append(min(length, kept))
    return accepted


def _commit_path(
    call: Call, sequence: Sequence, b: int, tokens: list[int], rows: list[int], verified: Verified
) -> int:
    """Commit the tokens behind ``rows`` of row b's window; returns how many were kept."""
    kept = _commit(call, sequence, tokens, verified.scores[b][rows], rows)
    packed = torch.tensor(rows[:kept], device=call.state.device) + verified.first_row[b]
    features = verified.output.features_RTH if call.draft is not None else None
    commit_cache(call.state, sequence, rows[:kept], None if features is None else features[packed])
    output = verified.output
    call.recorder.add_rows(sequence, packed, output.logits_RV, output.hidden_states)
    return kept


def _commit(
    call: Call, sequence: Sequence, tokens: list[int], scores_RV: torch.Tensor, rows: list[int]
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
