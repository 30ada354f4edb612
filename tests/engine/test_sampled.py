"""Catches: coupled sampling that differs from plain sampling with the same seed for any tree,
warper, processor, batch or stop rule (F7, G1, G2); seeds that are ignored, shared by rows or spoilt
by neighbours (F9); a sampled law through the real `generate` that is not the target's (F5, F8).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted import Mixed as Script
from scripted import ScriptedModel, small_drafter, unpadded
from tiny import tiny_llama
from transformers import StoppingCriteria, StoppingCriteriaList

from eagle4 import Eagle4ForCausalLM
from tests.engine.compare import VOCAB, piece_tokenizer, prompt, shared_target
from tests.engine.test_processors import RULES as PROCESSORS
from tests.engine.test_streaming import Recording

LENGTHS = [6, 1, 4]
NEW = 14
WARPERS: dict[str, dict[str, Any]] = {
    "none": {"top_k": 0},
    "default": {},
    "cold": {"temperature": 0.3},
    "tiny": {"temperature": 1e-6},
    "hot": {"temperature": 1.5, "top_k": 0},
    "top p": {"top_p": 0.9},
    "min p": {"min_p": 0.1},
    "typical": {"typical_p": 0.8},
    "epsilon": {"epsilon_cutoff": 0.05},
    "eta": {"eta_cutoff": 0.1},
    "top h": {"top_h": 0.4},
    "all": {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.95},
}
TREES: dict[str, dict[str, Any]] = {
    "tree": {},
    "chain": {"mode": "chain"},
    "narrow": {"top_k": 2, "max_nodes": 3, "max_depth": 2},
    "wide": {"top_k": 8, "max_nodes": 40},
}


@pytest.fixture(scope="module")
def model() -> Eagle4ForCausalLM:
    target = shared_target()
    return Eagle4ForCausalLM(target, small_drafter(target))


def sample(model, inputs, speculative: Any = None, seed: Any = 5, **kwargs: Any):
    kwargs = {"max_new_tokens": NEW, "do_sample": True, **kwargs}
    return model.generate(**inputs, speculative=speculative, seed=seed, **kwargs)


def assert_coupled(model, inputs, speculative: dict | None = None, **kwargs: Any) -> None:
    """The same seed gives the same tokens with speculation and without.

    The shapes are fixed ones, so that every round speculates; test_harness.py lets them vary.
    """
    speculative = {"harness": False, **(speculative or {})}
    wanted = sample(model, inputs, **kwargs)
    assert model.last_speculation.draft_calls == 0
    got = sample(model, inputs, speculative, **kwargs)
    assert got.tolist() == wanted.tolist()
    stats = model.last_speculation
    assert stats.nodes_verified and not stats.fallbacks, stats.fallbacks


@pytest.mark.parametrize(
    ("warper", "tree"),
    [(warper, "tree") for warper in WARPERS]
    + [(warper, tree) for warper in ("none", "all") for tree in TREES if tree != "tree"],
)
def test_coupled_equals_plain(model, warper, tree):
    assert_coupled(model, prompt(LENGTHS, extra=1), TREES[tree], **WARPERS[warper])


@pytest.mark.parametrize("name", PROCESSORS)
def test_coupled_equals_plain_with_processors(model, name):
    inputs = prompt(LENGTHS, extra=1)
    assert_coupled(model, inputs, temperature=0.9, **PROCESSORS[name])
    if name not in ("normalised", "encoder"):  # the seed meets nothing that these change
        free = sample(model, inputs, temperature=0.9)
        assert sample(model, inputs, temperature=0.9, **PROCESSORS[name]).tolist() != free.tolist()


@pytest.mark.parametrize("right", [[2, 0, 3], [40, 40, 40]])
def test_drafts_that_know_the_future(right):
    """A script that knows the sampled text is accepted all the way, wrong siblings or not."""
    inputs = prompt(LENGTHS)
    target = shared_target()
    plain = Eagle4ForCausalLM(target, small_drafter(target))
    wanted = sample(plain, inputs, max_new_tokens=40)
    model = ScriptedModel(target, Script(unpadded(wanted, inputs), VOCAB, right))
    assert sample(model, inputs, "eagle4", max_new_tokens=30).tolist() == wanted[:, :-10].tolist()
    assert right[0] < 40 or model.last_speculation.accept_length > 5


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_seeds_and_rows(model, sampling):
    speculative = {"sampling": sampling, "harness": False}
    inputs = prompt([5, 5, 5])
    same = {name: value[:1].repeat(3, 1) for name, value in inputs.items()}
    first = sample(model, same, speculative)
    assert sample(model, same, speculative).tolist() == first.tolist()
    assert len({tuple(row) for row in first.tolist()}) == 3, "rows are independent"
    assert sample(model, same, speculative, seed=6).tolist() != first.tolist()
    equal = sample(model, same, speculative, seed=[9, 9, 9])
    assert len({tuple(row) for row in equal.tolist()}) == 1, "one seed, one text"


@pytest.mark.parametrize("speculative", [None, "eagle4", {"mode": "chain"}])
def test_a_row_with_its_own_seed_draws_what_it_draws_alone(model, speculative):
    inputs = prompt(LENGTHS, extra=2)
    seeds = [3, 1 << 63, -8]
    together = unpadded(sample(model, inputs, speculative, seed=seeds), inputs)
    for row, length in enumerate(LENGTHS):
        ids = inputs["input_ids"][row : row + 1, -length:]
        for seed in ([seeds[row]], seeds[row]):
            alone = sample(model, {"input_ids": ids}, speculative, seed=seed)
            assert alone[0].tolist() == together[row]
    order = [2, 0, 1]
    shuffled = {name: value[order] for name, value in inputs.items()}
    again = sample(model, shuffled, speculative, seed=[seeds[i] for i in order])
    assert unpadded(again, shuffled) == [together[i] for i in order]


REJECTION = {"sampling": "rejection", "harness": False}


@pytest.mark.parametrize("speculative", [None, "eagle4", REJECTION])
def test_torch_manual_seed_governs_without_a_seed(model, speculative):
    inputs = prompt(LENGTHS)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(sample(model, inputs, speculative, seed=None).tolist())
    assert outs[0] == outs[1] != outs[2]
    torch.manual_seed(1)
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=3)
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state()), "greedy decoding draws nothing"
    assert greedy.shape[1] == 9


@pytest.mark.parametrize("speculative", [None, "eagle4"])
def test_several_sequences_per_prompt(model, speculative):
    inputs = prompt([4, 2])
    out = sample(model, inputs, speculative, num_return_sequences=3)
    assert out.shape == (6, 4 + NEW) and len({tuple(row) for row in out.tolist()}) == 6
    seeds = [1, 2, 3, 4, 5, 6]
    own = sample(model, inputs, speculative, num_return_sequences=3, seed=seeds)
    alone = sample(model, {"input_ids": inputs["input_ids"][:1]}, speculative, seed=2)
    assert alone[0].tolist() == own[1].tolist()


@pytest.mark.parametrize("seed", [1.5, True, "7", [1, None], 1 << 64, -(1 << 63) - 1, [2.0]])
@pytest.mark.parametrize("speculative", [None, "eagle4"])
def test_bad_seeds(model, speculative, seed):
    with pytest.raises(ValueError, match="seed="):
        sample(model, prompt([3]), speculative, seed=seed)
    with pytest.raises(ValueError, match="2 entries but 1"):
        sample(model, prompt([3]), speculative, seed=[1, 2])


def test_seeds_only_where_they_are_honoured(model):
    for kwargs in ({"num_beams": 2}, {"use_cache": False}):
        with pytest.raises(ValueError, match="seed"):
            sample(model, prompt([3]), None, **kwargs)


# -- stops, outputs, streams -----------------------------------------------------------------------


class AtLength(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] == self.length)


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_stop_rules_cut_token_by_token(model, sampling):
    inputs = prompt([5])
    speculative = {"sampling": sampling, "harness": False}
    whole = sample(model, inputs, speculative)[0].tolist()
    for length in range(6, 5 + NEW, 2):
        criteria = StoppingCriteriaList([AtLength(length)])
        cut = sample(model, inputs, speculative, stopping_criteria=criteria)
        assert cut[0].tolist() == whole[:length]
    for eos in sorted(set(whole[5:]))[:5]:
        cut = sample(model, inputs, speculative, eos_token_id=eos, pad_token_id=0)
        assert cut[0].tolist() == whole[: whole.index(eos, 5) + 1]


def test_stop_strings(model):
    tokenizer = piece_tokenizer(VOCAB)
    inputs = prompt([5])
    text = tokenizer.decode(sample(model, inputs)[0, 5:])
    kwargs = dict(tokenizer=tokenizer, stop_strings=[text[4:6]])
    assert_coupled(model, inputs, **kwargs)
    assert sample(model, inputs, **kwargs).shape[1] < 5 + NEW


@pytest.mark.parametrize("eos", [[], [3, 7, 11, 15]])
def test_streams_and_finished_rows(model, eos):
    kwargs = dict(eos_token_id=eos, pad_token_id=0) if eos else {}
    inputs = prompt(LENGTHS)
    streams = []
    for speculative in (None, "eagle4"):
        recorder = Recording()
        out = sample(model, inputs, speculative, streamer=recorder, **kwargs)
        streams.append((out.tolist(), [put.tolist() for put in recorder.puts], recorder.ends))
    assert streams[0] == streams[1]


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_scores_and_logits_are_those_of_the_drawn_tokens(model, sampling):
    """Recomputed from the ids alone: raw logits, and the law that the token was drawn from."""
    inputs = prompt([5])
    out = sample(
        model,
        inputs,
        {"sampling": sampling, "harness": False},
        temperature=0.7,
        top_k=9,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == NEW
    whole = model.target(out.sequences).logits[0]
    for step in range(NEW):
        logits = whole[4 + step]
        torch.testing.assert_close(out.logits[step][0], logits, atol=1e-4, rtol=1e-4)
        scores = logits / 0.7
        scores[scores < scores.topk(9).values[-1]] = float("-inf")
        torch.testing.assert_close(out.scores[step][0], scores, atol=1e-4, rtol=1e-4)
        assert torch.isfinite(out.scores[step][0, out.sequences[0, 5 + step]])


def test_a_cache_handed_back_continues_the_same_text(model):
    inputs = prompt([5])
    whole = sample(model, inputs, "eagle4", max_new_tokens=20)
    first = sample(model, inputs, "eagle4", max_new_tokens=9, return_dict_in_generate=True)
    second = sample(
        model,
        {"input_ids": first.sequences},
        "eagle4",
        max_new_tokens=11,
        past_key_values=first.past_key_values,
    )
    assert second.tolist() == whole.tolist()


# -- the law through generate ----------------------------------------------------------------------


LAW = {"temperature": 0.8, "top_k": 5}


def bigram_target(vocab: int = 6):
    """A target whose next token depends on the last one only, so every step is a fresh sample."""
    target = tiny_llama(vocab=vocab, layers=2)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return target


def chi_square(model, speculative: Any, samples: int, seed: int, rows: int = 100) -> float:
    """p-value of tokens against the target's law, given the two tokens before."""
    vocab, steps = model.target.config.vocab_size, min(200, samples // rows)
    counts = torch.zeros(vocab**3, dtype=torch.int64)
    ids = torch.randint(vocab, (rows, 1), generator=torch.Generator().manual_seed(seed))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for call in range(samples // (rows * steps)):
        settings = {**LAW, "max_new_tokens": steps + 1, "seed": seed + call}
        out = sample(model, inputs, speculative, **settings)
        triples = out[:, :-2] * vocab**2 + out[:, 1:-1] * vocab + out[:, 2:]
        counts += torch.bincount(triples.flatten(), minlength=vocab**3)
    with torch.no_grad():
        logits_VV = model.target(torch.arange(vocab)[:, None]).logits[:, 0].double()
    logits_VV /= LAW["temperature"]
    logits_VV[logits_VV < logits_VV.topk(LAW["top_k"]).values[:, -1:]] = float("-inf")
    counts_VVV, law_1VV = counts.view(vocab, vocab, vocab), logits_VV.softmax(-1)[None]
    assert not counts_VVV[:, law_1VV[0] == 0].any(), "a token that the warpers forbid"
    expected_VVV = counts_VVV.sum(-1, keepdim=True) * law_1VV
    is_frequent = expected_VVV >= 5
    terms = (counts_VVV - expected_VVV)[is_frequent] ** 2 / expected_VVV[is_frequent]
    freedom = (is_frequent.sum(-1) - 1).clamp_min(0).sum().double()
    return float(torch.special.gammaincc(freedom / 2, terms.sum() / 2))


SAMPLED = {
    "plain": None,
    "coupled": {"max_nodes": 4, "top_k": 2},
    "rejection": {"sampling": "rejection", "max_nodes": 4, "top_k": 2, "harness": False},
    "rejection chain": {
        "sampling": "rejection",
        "mode": "chain",
        "max_depth": 2,
        "harness": False,
    },
}


@pytest.fixture(scope="module")
def six_tokens() -> Eagle4ForCausalLM:
    target = bigram_target()
    return Eagle4ForCausalLM(target, small_drafter(target, num_candidates=5))


@pytest.mark.parametrize("name", SAMPLED)
def test_the_law_through_generate(six_tokens, name):
    assert chi_square(six_tokens, SAMPLED[name], samples=1500, seed=100) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_the_law_through_generate_with_many_samples(six_tokens, name):
    assert chi_square(six_tokens, SAMPLED[name], samples=200_000, seed=100_000) > 1e-4
