"""The generation loop: prefill, then rounds until every row has stopped.

The loop asks the policy for a plan, the draft for a tree and the reference round for a verdict, and
commits. Whatever goes wrong on the draft side ends speculation, never the request.
"""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList

from ..harness import Policy
from ..sampling import for_sequence
from ..target import TargetAdapter
from ..types import Drawn, Law, Tree
from .call import Call, Request, Result
from .choices import choose_tokens
from .commit import commit_cache, commit_tokens
from .drafting import Draft, DraftError
from .fallback import is_out_of_memory, stop_speculating
from .graphs import EAGER, Graphs
from .output import Recorder, Streamer
from .plans import before_round, load_of, report_round
from .prefix import Eagle4Cache, resume
from .reference import Verified, empty_tree, prefill, verify
from .state import Sequence, State


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
    with target.attached(with_taps=draft is not None, run_block=graphs.block):
        _generate(call)
    return _result(call)


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
        call.target.vocab,
    )
    _commit(call, sequence, [int(chosen.choice_BR[0, 0])], chosen.scores[0], [])
    call.recorder.add_rows(sequence, torch.tensor([0]), chosen.logits_RV, None)


def _round(call: Call, sequences: list[Sequence]) -> None:
    stats = call.stats
    limits = [_depth_limit(call, sequence) for sequence in sequences]
    before = before_round(call, sequences)
    drafted = _draft(call, sequences, limits)
    try:
        tree, verified = _verify(call, sequences, drafted)
    except Exception as error:
        if drafted is None or not is_out_of_memory(error):
            raise
        stop_speculating(call, error)
        drafted = None
        tree, verified = _verify(call, sequences, None)
    speculative = drafted is not None
    stats.rounds += 1
    stats.target_calls += 1
    stats.plain_rounds += not speculative
    with stats.stage("commit"):
        accepted = [
            _commit_verdict(call, sequence, b, tree, verified, speculative)
            for b, sequence in enumerate(sequences)
        ]
    stats.accepted_per_round.append(accepted)
    report_round(call, before, is_planned=max(limits) > 0)


def _verify(
    call: Call, sequences: list[Sequence], drafted: tuple[Tree, Law | None] | None
) -> tuple[Tree, Verified]:
    """Run the tree, or the roots alone, through the target."""
    tree, law = drafted or (empty_tree(len(sequences), call.state.device), None)
    hidden = call.request.output_hidden_states
    with call.stats.stage("verify"):
        return tree, verify(call.state, sequences, tree, call.target, call.processors, hidden, law)


def _depth_limit(call: Call, sequence: Sequence) -> int:
    """Nodes deeper than this could never be committed: the bonus fills the last place."""
    room = call.request.max_length - (sequence.pad + sequence.length) - 1
    if call.request.max_position is not None:
        room = min(room, call.request.max_position - sequence.length)
    return max(room, 0)


def _draft(
    call: Call, sequences: list[Sequence], limits: list[int]
) -> tuple[Tree, Law | None] | None:
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
        _check_tokens(tree, call.target.config.vocab_size)
    except Exception as error:  # whatever it is: plain decoding can do without the draft
        stop_speculating(call, error)
        return None
    call.stats.nodes_verified += int(tree.count_B.sum())
    return tree, law


def _check_tokens(tree: Tree, vocab_size: int) -> None:
    """What the target could not embed must not reach it."""
    if (
        tree.token_BN.numel()
        and not 0 <= int(tree.token_BN.min()) <= int(tree.token_BN.max()) < vocab_size
    ):
        raise DraftError("a drafted token is outside the target's vocabulary")


def _commit_verdict(
    call: Call, sequence: Sequence, b: int, tree: Tree, verified: Verified, speculative: bool
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


def _result(call: Call) -> Result:
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
