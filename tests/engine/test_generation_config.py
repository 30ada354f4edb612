"""Catches: an argument of `GenerationConfig` that is ignored or half honoured with speculation (G1,
B8), in greedy decoding or in sampling, and one that a new version of Transformers adds: it fails
here until somebody says what becomes of it.

Greedy: the tokens are Transformers'. Sampling: Transformers is made to draw the very tokens that
speculation gave, and its processed scores at every step, hence its law, and its end must be ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted import small_drafter
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

from eagle4 import Eagle4ForCausalLM
from tests.engine.compare import VOCAB, piece_tokenizer, prompt, shared_target


def healing_tokenizer():
    tokenizer = piece_tokenizer(VOCAB)
    tokenizer.bos_token = "<1>"
    return tokenizer


EOS = {"eos_token_id": [3, 9, 14], "pad_token_id": 0}
SERVED: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 11, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_length": {"min_length": 12, **EOS},
    "min_new_tokens": {"min_new_tokens": 6, **EOS},
    "max_time": {"max_time": 600.0},
    "stop_strings": {"stop_strings": ["ab", "d", "<9>"], "tokenizer": piece_tokenizer(VOCAB)},
    "do_sample": {},
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.08},
    "eta_cutoff": {"eta_cutoff": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[4], [7, 8]]},
    "renormalize_logits": {"renormalize_logits": True},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.6), **EOS},
    "suppress_tokens": {"suppress_tokens": [4, 5, 6, 7]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(12))},
    "sequence_bias": {"sequence_bias": [[[4], 3.0], [[8, 9], -5.0]]},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "num_return_sequences": {"num_return_sequences": 2},
    "output_hidden_states": {"output_hidden_states": True},
    "output_scores": {"output_scores": True},
    "output_logits": {"output_logits": True},
    "return_dict_in_generate": {},
    "pad_token_id": {"pad_token_id": 2, "eos_token_id": [3, 9, 14]},
    "bos_token_id": {"bos_token_id": 1},
    "eos_token_id": EOS,
    "token_healing": {"token_healing": True, "tokenizer": healing_tokenizer()},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
    # Settings of other strategies, caches or of compilation: no effect on tokens here or there.
    "early_stopping": {"early_stopping": True},
    "length_penalty": {"length_penalty": 2.0},
    "diversity_penalty": {"diversity_penalty": 0.5},
    "low_memory": {"low_memory": True},
    "cache_config": {"cache_config": {"nbits": 4}},
    "max_cache_len": {"max_cache_len": 64},
    "decoder_start_token_id": {"decoder_start_token_id": 1},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.1},
    "max_matching_ngram_size": {"max_matching_ngram_size": 2},
    "assistant_lookbehind": {"assistant_lookbehind": 3},
    "target_lookbehind": {"target_lookbehind": 3},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "compile_config": {"compile_config": CompileConfig()},
    "disable_compile": {"disable_compile": True},
}
# From here on nothing depends on how tokens are drawn.
NO_EFFECT = list(SERVED)[list(SERVED).index("output_hidden_states") :]
REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "use_mtp": True,
    "use_cache": False,
    "cache_implementation": "static",
    "guidance_scale": 1.5,
    "output_attentions": True,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "speculation_type": "dflash",
    "continuous_batching_config": object(),
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": [object()],
    "force_words_ids": [[1]],
}
METADATA = {"transformers_version"}


@pytest.fixture(scope="module")
def model() -> Eagle4ForCausalLM:
    target = shared_target()
    return Eagle4ForCausalLM(target, small_drafter(target))


def public_arguments() -> set[str]:
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")} - METADATA


def test_every_argument_is_served_or_refused():
    """A new one belongs into one of the two tables above, with the test that comes with it."""
    named = SERVED.keys() | REFUSED.keys()
    older = {"continuous_batching_config", "speculation_type", "assistant_ensemble_weight", "top_h"}
    assert public_arguments() - named == set()
    assert named - public_arguments() <= older
    assert not SERVED.keys() & REFUSED.keys()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(model, name, do_sample):
    with pytest.raises(ValueError, match=name):
        model.generate(
            **prompt([5]), speculative="eagle4", do_sample=do_sample, **{name: REFUSED[name]}
        )


def arguments(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs = {"input_ids": torch.tensor([[6]])} if name == "forced_bos_token_id" else prompt([5, 3])
    if name == "token_healing":
        # A prompt that keeps its length when it is healed; any other fails in Transformers, too.
        inputs = {"input_ids": healing_tokenizer()("abcefdad", return_tensors="pt").input_ids}
    settings = {"max_new_tokens": 9, "return_dict_in_generate": True, **SERVED[name]}
    return inputs, {key: value for key, value in settings.items() if value is not None}


def outcome(generate, inputs, settings):
    try:
        return generate(**inputs, **settings)
    except Exception as error:  # the two sides must fail alike
        return type(error)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_those_of_transformers(model, name):
    inputs, settings = arguments(name)
    wanted = outcome(model.target.generate, inputs, {"do_sample": False, **settings})
    settings["speculative"] = "eagle4"
    got = outcome(model.generate, inputs, {"do_sample": False, **settings})
    if isinstance(wanted, type):
        assert got is wanted and name == "num_return_sequences"
        return
    assert got.sequences.tolist() == wanted.sequences.tolist()
    assert model.last_speculation.nodes_verified and not model.last_speculation.fallbacks


@pytest.mark.parametrize(
    ("name", "sampling"),
    [(name, "coupled") for name in SERVED]
    + [(name, "rejection") for name in SERVED if name not in NO_EFFECT],
)
def test_sampled_law_is_that_of_transformers(model, monkeypatch, name, sampling):
    inputs, settings = arguments(name)
    settings |= {"do_sample": True, "output_scores": True}
    got = model.generate(**inputs, **settings, speculative={"sampling": sampling}, seed=4)
    assert model.last_speculation.nodes_verified and not model.last_speculation.fallbacks
    if sampling == "coupled":
        plain = model.generate(**inputs, **settings, seed=4)
        assert plain.sequences.tolist() == got.sequences.tolist()
    first = inputs["input_ids"].shape[1]
    columns = iter(got.sequences[:, first:].split(1, dim=1))
    monkeypatch.setattr(torch, "multinomial", lambda *args, **kwargs: next(columns))
    wanted = model.target.generate(**inputs, **settings)
    assert next(columns, None) is None, "Transformers would have stopped earlier"
    assert wanted.sequences.tolist() == got.sequences.tolist()
    lengths = [len(row) for row in cut(got.sequences[:, first:], settings.get("eos_token_id", []))]
    assert len(got.scores) == len(wanted.scores)
    for step, (mine, theirs) in enumerate(zip(got.scores, wanted.scores, strict=True)):
        live = [row for row, length in enumerate(lengths) if step < length]
        torch.testing.assert_close(mine[live], theirs[live], atol=2e-4, rtol=1e-4)


def cut(rows: torch.Tensor, eos: list[int]) -> list[list[int]]:
    ends = [next((i for i, t in enumerate(row) if t in eos), len(row)) for row in rows.tolist()]
    return [row[: end + 1] for row, end in zip(rows.tolist(), ends, strict=True)]
