"""Catches: sampled output whose law is not the target's (F1, F2, F4 to F8, G1, G2): a q that is not
the law that was drawn from, siblings tried in another order than they were drawn, residuals that
are not laws, shapes that depend on draws, processors that miss the drafted prefix or a warper.

The law is summed over every way in which the random decisions can fall (`enumeration`), and the
same assertion fails for seven faults on purpose.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from eagle4.ops import rejection
from eagle4.tree import Template
from tests.engine.enumeration import Language, Rounds, target_law

PROMPT = (1, 0)
CHAIN = Template((-1, 0), (0, 0), (1, 2))
TREE = Template((-1, 0, -1), (0, 0, 1), (1, 2, 1))
WIDE = Template((-1, -1, -1), (0, 1, 2), (1, 1, 1))
DEEP = Template((-1, 0, 0, -1, 3), (0, 0, 1, 1, 0), (1, 2, 2, 1, 2))


def dynamic(last: int) -> Template:
    """The shape of a round follows from what the round before committed."""
    return {1: CHAIN, 2: WIDE}.get(last, TREE)


SHAPES = {
    "chain": lambda last: CHAIN,
    "static tree": lambda last: TREE,
    "dynamic tree": dynamic,
}
RULES = {
    "none": lambda: [],
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.5)],
    "high temperature": lambda: [hf.TemperatureLogitsWarper(2.5)],
    "tiny temperature": lambda: [hf.TemperatureLogitsWarper(1e-6)],
    "top k": lambda: [hf.TopKLogitsWarper(2)],
    "top p": lambda: [hf.TopPLogitsWarper(0.8)],
    "min p": lambda: [hf.MinPLogitsWarper(0.3)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.7)],
    "epsilon": lambda: [hf.EpsilonLogitsWarper(0.15)],
    "eta": lambda: [hf.EtaLogitsWarper(0.3)],
    "top h": lambda: [hf.TopHLogitsWarper(0.5)],
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.8)],
    "ngram": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "bad words": lambda: [hf.NoBadWordsLogitsProcessor([[2, 1], [0, 0]], [99])],
    "bias": lambda: [hf.SequenceBiasLogitsProcessor({(2,): 0.7, (1, 0): -3.0})],
    "min new": lambda: [hf.MinNewTokensLengthLogitsProcessor(2, 1, [2])],
    "forced eos": lambda: [hf.ForcedEOSTokenLogitsProcessor(4, 1)],
    "decay": lambda: [hf.ExponentialDecayLengthPenalty((0, 1.4), 2, 2)],
    "suppress": lambda: [hf.SuppressTokensLogitsProcessor([2])],
    "suppress at begin": lambda: [hf.SuppressTokensAtBeginLogitsProcessor([1], 2)],
    "allowed": lambda: [hf.PrefixConstrainedLogitsProcessor(after_last, 1)],
    "watermark": lambda: [hf.WatermarkLogitsProcessor(3, "cpu", bias=1.5, context_width=1)],
    "normalise": lambda: [hf.TemperatureLogitsWarper(0.6), hf.LogitNormalization()],
    "mixed": lambda: [
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(3),
        hf.TopPLogitsWarper(0.9),
    ],
}


def after_last(row: int, ids: torch.Tensor) -> list[int]:
    return [token for token in range(3) if token != (int(ids[-1]) + 1) % 3]


def assert_same_law(
    rule: str,
    shape: str,
    vocab: int = 3,
    horizon: int = 2,
    seed: int = 0,
    broken: str | None = None,
) -> None:
    language = Language(vocab, seed)
    processors = LogitsProcessorList(RULES[rule]())
    rounds = Rounds(language, processors, SHAPES[shape], broken)
    found = rounds.law(PROMPT, horizon)
    wanted = target_law(language, LogitsProcessorList(RULES[rule]()), PROMPT, horizon)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    for tokens in found.keys() | wanted.keys():
        assert abs(found.get(tokens, 0.0) - wanted.get(tokens, 0.0)) < 1e-10, tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_targets(rule, shape):
    assert_same_law(rule, shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", [name for name in RULES if name != "watermark"])
def test_the_law_with_four_tokens(rule, shape):
    assert_same_law(rule, shape, vocab=4)


@pytest.mark.parametrize(
    ("vocab", "horizon", "shape"),
    [
        (3, 3, "static tree"),
        pytest.param(3, 3, "dynamic tree", marks=pytest.mark.slow),
        pytest.param(4, 2, "static tree", marks=pytest.mark.slow),
        (4, 1, "static tree"),
        (6, 1, "chain"),
        pytest.param(6, 2, "chain", marks=pytest.mark.slow),
    ],
)
def test_other_sizes(vocab, horizon, shape):
    assert_same_law("temperature", shape, vocab, horizon, seed=1)


@pytest.mark.parametrize("template", [WIDE, DEEP])
def test_three_siblings_and_two_families(monkeypatch, template):
    monkeypatch.setitem(SHAPES, "one", lambda last: template)
    assert_same_law("mixed", "one", vocab=4 if template is WIDE else 3)


FAULTS = [
    "raw q",
    "q before warping",
    "greedy drafts with q ratios",
    "siblings out of order",
    "stopping on a drawn token",
]


@pytest.mark.parametrize("broken", FAULTS)
def test_faults_are_seen(broken):
    with pytest.raises(AssertionError):
        assert_same_law("temperature", "static tree", vocab=4, broken=broken, horizon=1)


def test_a_residual_that_is_no_law_is_seen(monkeypatch):
    monkeypatch.setattr(rejection, "_normalised", lambda residual, otherwise: residual)
    with pytest.raises(AssertionError):
        assert_same_law("temperature", "static tree", vocab=4, horizon=1)


def test_a_q_that_keeps_rejected_siblings_is_seen(monkeypatch):
    real = rejection.trials

    def stale(token_S, p_S, child_K, token_C, logq_C):
        for child in child_K:
            trial = next(real(token_S, p_S, child[None], token_C, logq_C))
            p_S = trial.residual_S
            yield trial

    monkeypatch.setattr(rejection, "trials", stale)
    with pytest.raises(AssertionError):
        assert_same_law("temperature", "static tree", vocab=4, horizon=1)


@pytest.mark.parametrize("seed", range(20))
def test_equal_laws_accept_every_first_draw(seed):
    """Where q is p nothing is refused; what rounding may refuse has no part in the residual."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.arange(5)
    logp = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    for first in range(5):
        for child in rejection.trials(tokens, logp.exp(), tokens[[first]], tokens, logp):
            assert float(child.accept) == pytest.approx(1.0, abs=1e-12)
            assert float(child.residual_S.sum()) == pytest.approx(1.0)
            assert float(child.accept) == 1.0 or float(child.residual_S[first]) == 0.0


def test_laws_equal_to_the_last_bit_leave_no_empty_residual():
    tokens, law = torch.arange(4), torch.full((4,), 0.25, dtype=torch.float64)
    (child,) = rejection.trials(tokens, law, tokens[[1]], tokens, law.log())
    third = 1 / 3
    assert child.residual_S.tolist() == pytest.approx([third, 0.0, third, third])
