"""Catches: a processor that sees a sibling's or a stranger's tokens, or a history without the draft
prefix (A5, G2); batch ids and per-row settings lost because rows are processed alone; a constraint
shown a prefix that plain decoding never builds (it may raise there, G5); stateful processors called
for tokens that are not committed; raw logits changed in place (R2).
"""

from __future__ import annotations

import random

import pytest
import tiny
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig
from transformers.generation import logits_process as hf

from eagle4.sampling import context_free, draft_law, for_sequence, process_path
from eagle4.types import Candidates

VOCAB = 12


def processors(name: str, batch: int = 1) -> LogitsProcessorList:
    """One of Transformers' own, or a mix, as `generate` would build it for prompts of 5 tokens."""
    prompt = prompts(batch)
    made = {
        "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
        "repetition per row": lambda: hf.RepetitionPenaltyLogitsProcessor(
            1.7, prompt_ignore_length=torch.arange(batch) + 3
        ),
        "ngram": lambda: hf.NoRepeatNGramLogitsProcessor(2),
        "bad words": lambda: hf.NoBadWordsLogitsProcessor([[3, 4], [5], [6, 7, 8]], [0]),
        "bias": lambda: hf.SequenceBiasLogitsProcessor({(3,): 2.0, (4, 5): -9.0}),
        "min new": lambda: hf.MinNewTokensLengthLogitsProcessor(5, 2, [1, 2]),
        "min length": lambda: hf.MinLengthLogitsProcessor(7, [1, 2]),
        "suppress": lambda: hf.SuppressTokensLogitsProcessor([4, 9]),
        "suppress at begin": lambda: hf.SuppressTokensAtBeginLogitsProcessor([4, 9], 5),
        "forced eos": lambda: hf.ForcedEOSTokenLogitsProcessor(8, 2),
        "decay": lambda: hf.ExponentialDecayLengthPenalty((0, 1.5), 2, 5),
        "encoder repetition": lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(2.0, prompt),
        "encoder ngram": lambda: hf.EncoderNoRepeatNGramLogitsProcessor(1, prompt),
        "allowed": lambda: hf.PrefixConstrainedLogitsProcessor(allowed_tokens, 1),
        "normalise": lambda: hf.LogitNormalization(),
    }
    names = [n for n in NAMES if n != "all"] if name == "all" else [name]
    return LogitsProcessorList([made[name]() for name in names])


NAMES = [
    *(
        "repetition",
        *["repetition per row"] * tiny.HAS_IGNORE_LENGTH_PER_ROW,
        "ngram",
        "bad words",
        "bias",
        "min new",
        "min length",
    ),
    *("suppress", "suppress at begin", "forced eos", "decay", "encoder repetition"),
    *("encoder ngram", "allowed", "normalise", "all"),
]


def prompts(batch: int) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, 5), generator=torch.Generator().manual_seed(4))


def allowed_tokens(row: int, ids: torch.Tensor) -> list[int]:
    """Depends on the batch row and on the last token."""
    return [t for t in range(VOCAB) if (t + int(ids[-1]) + row) % 3]


def random_tree(source: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    parents = [source.randint(-1, i - 1) for i in range(nodes)]
    return parents, [source.randrange(VOCAB) for _ in range(nodes)]


def path_tokens(parents: list[int], tokens: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def plant(logits_RV: torch.Tensor, parents: list[int], tokens: list[int], node: int) -> None:
    """Make the walk lead to ``node`` whatever the processors subtract, unless they forbid it."""
    while node >= 0:
        logits_RV[parents[node] + 1, tokens[node]] = 300.0
        node = parents[node]


def plain(processor, batch: int, row: int, history: list[int], logits_V: torch.Tensor):
    """What Transformers computes for this row: the whole batch at once, no views."""
    ids = torch.tensor([history] * batch)
    scores = logits_V.float().repeat(batch, 1)
    return processor(ids, scores)[row]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_scored_on_its_own_full_history(name, batch):
    source = random.Random(f"{name}{batch}")
    compared = 0
    for trial in range(12):
        row = trial % batch
        history = prompts(batch)[row].tolist()
        parents, tokens = random_tree(source, 6)
        logits_RV = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(trial))
        plant(logits_RV, parents, tokens, source.randrange(6))
        raw = logits_RV.clone()
        view = for_sequence(processors(name, batch), row, batch)
        scores_RV, choice_R = process_path(
            view, logits_RV, torch.tensor(history), torch.tensor(tokens), torch.tensor(parents)
        )
        assert torch.equal(logits_RV, raw), "raw logits are an output too"
        reached = (choice_R >= 0).nonzero().squeeze(1).tolist()
        assert reached[0] == 0
        assert torch.equal(choice_R[reached], scores_RV[reached].argmax(-1))
        for r in reached:
            node = r - 1
            seen = history + path_tokens(parents, tokens, node)
            twins = [i for i in range(-1, node) if path_tokens(parents, tokens, i) == seen[5:]]
            wanted = plain(processors(name, batch), batch, row, seen, raw[min([node, *twins]) + 1])
            # NaN where "all" leaves no token
            torch.testing.assert_close(scores_RV[r], wanted, rtol=0, atol=0, equal_nan=True)
            compared += 1
    assert compared > 12, "the walk never left the root"


@pytest.mark.parametrize("name", ["repetition", "ngram", "bad words"])
def test_siblings_and_their_descendants_do_not_leak(name):
    """A trunk 0 - 1 - 2 scores the same with strangers hanging from every node."""
    history = torch.tensor([1, 2, 3, 4, 1])
    trunk = [8, 2, 3]
    logits_RV = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    for r, token in enumerate(trunk):
        logits_RV[r, token] = 300.0
    alone = process_path(
        processors(name), logits_RV, history, torch.tensor(trunk), torch.tensor([-1, 0, 1])
    )
    # The trunk is nodes 1, 4 and 6. Strangers carry the tokens that would be penalised or banned
    # next, beside the trunk and below strangers, before and after it.
    tokens = torch.tensor([2, 8, 3, 3, 2, 6, 3, 4, 7, 9, 9])
    parents = torch.tensor([-1, -1, 0, 1, 1, 3, 4, 4, 5, 6, 7])
    own = [0, 2, 5, 7]
    rows = torch.randn(12, VOCAB)
    rows[own] = logits_RV
    scores_RV, choice_R = process_path(processors(name), rows, history, tokens, parents)
    assert choice_R[own].tolist() == alone[1].tolist()
    reached = [i for i in range(4) if alone[1][i] >= 0]
    assert len(reached) >= 2
    for i in reached:
        assert torch.equal(alone[0][i], scores_RV[own[i]])


def test_without_processors_every_row_has_its_argmax():
    logits_RV = torch.randn(5, VOCAB).bfloat16()
    scores_RV, choice_R = process_path(
        LogitsProcessorList(), logits_RV, torch.tensor([1]), torch.arange(4), torch.arange(4) - 1
    )
    assert scores_RV.dtype == torch.float32
    assert torch.equal(scores_RV, logits_RV.float())
    assert torch.equal(choice_R, scores_RV.argmax(-1))


class Counting(LogitsProcessor):
    """Stateful: its n-th call favours token n."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores[:, len(self.seen)] += 1000.0
        return scores


def test_a_stateful_processor_is_called_once_per_committed_token():
    counting = Counting()
    # A tree that holds the path 1, 2 and strangers: calls at the root, at 1 and at 2.
    tokens, parents = torch.tensor([9, 1, 2, 1, 2, 5]), torch.tensor([-1, -1, 0, 0, 1, 4])
    scores_RV, choice_R = process_path(
        LogitsProcessorList([counting]), torch.zeros(7, VOCAB), torch.tensor([7]), tokens, parents
    )
    assert counting.seen == [[7], [7, 1], [7, 1, 2]]
    assert choice_R.tolist() == [1, -1, 2, -1, -1, 3, -1]


class Grammar:
    """Only 1, 2, 3, 1, 2, 3, ... is allowed; any other prefix is a bug of the caller."""

    def __init__(self, end: int | None = None):
        self.end = end

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        wanted = [1 + i % 3 for i in range(len(ids))]
        if ids.tolist() != wanted:
            raise KeyError(f"impossible prefix {ids.tolist()}")
        return [] if len(ids) == self.end else [1 + len(ids) % 3]


def constrained(end: int | None = None) -> LogitsProcessorList:
    return LogitsProcessorList([hf.PrefixConstrainedLogitsProcessor(Grammar(end), 1)])


def test_a_constraint_never_meets_a_prefix_that_it_forbids():
    tokens, parents = torch.tensor([2, 3, 3, 1, 9]), torch.tensor([-1, -1, 0, 2, 0])
    scores_RV, choice_R = process_path(
        constrained(), torch.zeros(6, VOCAB), torch.tensor([1]), tokens, parents
    )
    assert choice_R.tolist() == [2, 3, -1, 1, 2, -1]


def test_a_processor_that_fails_below_the_root_ends_the_path_there():
    tokens, parents = torch.tensor([2, 3, 1]), torch.tensor([-1, 0, 1])
    walk = process_path(constrained(3), torch.zeros(4, VOCAB), torch.tensor([1]), tokens, parents)
    # The node that carries 3 cannot be processed: 3 is still the choice after 2.
    assert walk[1].tolist() == [2, 3, -1, -1]
    with pytest.raises(ValueError, match="empty list"):
        process_path(
            constrained(1), torch.zeros(1, VOCAB), torch.tensor([1]), tokens[:0], parents[:0]
        )


def test_watermark_state_follows_one_row():
    config = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, context_history_size=8)
    batch, steps = 3, 5
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (batch, 4 + steps), generator=source)
    logits = torch.randn(steps, batch, VOCAB, generator=source)
    whole = config.construct_processor(VOCAB, "cpu")
    expected = [whole(ids[:, : 4 + i], logits[i].clone()) for i in range(steps)]
    shared = LogitsProcessorList([config.construct_processor(VOCAB, "cpu")])
    views = [for_sequence(shared, row, batch) for row in range(batch)]
    # Rows advance at their own pace.
    for row in (2, 0, 1):
        for i in range(steps):
            got = views[row](ids[row : row + 1, : 4 + i], logits[i, row : row + 1].clone())
            torch.testing.assert_close(got[0], expected[i][row])


class PerRow(LogitsProcessor):
    """A user's processor that holds one bias per row of the batch."""

    def __init__(self, bias_BV: torch.Tensor):
        self.bias_BV = bias_BV

    def __call__(self, input_ids, scores):
        return scores + self.bias_BV


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_users_per_row_processor_keeps_its_row(row):
    bias = torch.randn(3, VOCAB)
    view = for_sequence(LogitsProcessorList([PerRow(bias)]), row, 3)
    scores = torch.randn(1, VOCAB)
    assert torch.equal(view(torch.tensor([[1, 2]]), scores), scores + bias[row])


class Tally(LogitsProcessor):
    """Stateful: its n-th call favours token n."""

    is_stateful = True

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls] += 1000.0
        return scores


def test_a_processor_that_declares_state_gets_one_copy_per_row():
    shared = LogitsProcessorList([Tally()])
    views = [for_sequence(shared, row, 2) for row in range(2)]
    ids, scores = torch.tensor([[1, 2]]), torch.zeros(1, VOCAB)
    found = [int(views[row](ids, scores).argmax()) for row in (0, 0, 1, 0, 1)]
    assert found == [1, 2, 1, 3, 2]
    assert for_sequence(shared, 0, 1)[0] is shared[0], "alone it is the user's own"


def test_a_draft_law_is_the_warped_law_of_the_candidates():
    candidates = Candidates(torch.tensor([[7, 2, 9]]), torch.tensor([[0.5, 0.3, 0.2]]).log())
    warpers = LogitsProcessorList(
        [hf.RepetitionPenaltyLogitsProcessor(1.5), hf.TemperatureLogitsWarper(0.5)]
        + [hf.TopKLogitsWarper(2), hf.LogitNormalization()]
    )
    law = draft_law(context_free(warpers), candidates)
    assert law.logp_RK.dtype == torch.float64
    wanted = torch.tensor([[25 / 34, 9 / 34, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(law.logp_RK.exp(), wanted, atol=1e-6, rtol=0)
