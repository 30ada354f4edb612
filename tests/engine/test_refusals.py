"""Catches: an argument that is silently ignored or fails in mid-run instead of being refused by
name before the first forward (B8, E3), and one that is refused although plain decoding can serve
it: without speculation everything that Transformers does still works and gives the same result.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from scripted import small_drafter
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from eagle4 import Eagle4ForCausalLM, SpeculativeConfig
from eagle4.target import TargetAdapter
from tests.engine.compare import VOCAB, eagle, plain, prompt, shared_target


@pytest.fixture
def model() -> Eagle4ForCausalLM:
    target = shared_target()
    return Eagle4ForCausalLM(target, small_drafter(target))


@pytest.fixture
def no_forward(monkeypatch, model):
    """Any forward of target or drafter fails the test."""

    def forbidden(*args, **kwargs):
        raise AssertionError("work was done before the refusal")

    monkeypatch.setattr(TargetAdapter, "forward", forbidden)
    monkeypatch.setattr(model.target, "forward", forbidden)
    monkeypatch.setattr(model.drafter, "forward", forbidden)
    return forbidden


def cases() -> dict[str, dict[str, Any]]:
    other = shared_target(seed=5)
    return {
        "num_beams": {"num_beams": 3},
        "beam_sample": {"num_beams": 3, "do_sample": True},
        "assistant_model": {"assistant_model": other},
        "inputs_embeds": {"inputs_embeds": torch.randn(1, 4, 32)},
        "use_cache": {"use_cache": False},
        "cache_implementation": {"cache_implementation": "static"},
        "guidance_scale": {"guidance_scale": 1.5},
        "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
        "negative_prompt_ids": {"negative_prompt_ids": torch.tensor([[1, 2]])},
        "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
        "dola_layers": {"dola_layers": "high"},
        "custom_generate": {"custom_generate": lambda model, input_ids, **kwargs: input_ids},
        "synced_gpus": {"synced_gpus": True},
        "assistant_early_exit": {"assistant_early_exit": 1},
        "position_ids": {"position_ids": torch.arange(3, 8)[None]},
    }


@pytest.mark.parametrize("name", list(cases()))
def test_arguments_that_speculation_cannot_honour(model, no_forward, name):
    inputs = prompt([5])
    if name == "inputs_embeds":
        inputs = {}
    match = "num_beams" if name == "beam_sample" else name
    with pytest.raises(ValueError, match=match):
        model.generate(**inputs, **cases()[name], max_new_tokens=4, speculative="eagle4")


@pytest.mark.parametrize("name", ["num_beams", "cache_implementation", "guidance_scale"])
def test_the_same_settings_in_a_generation_config(model, no_forward, name):
    config = GenerationConfig(max_new_tokens=4, speculative="eagle4", **cases()[name])
    with pytest.raises(ValueError, match=name):
        model.generate(**prompt([5]), generation_config=config)


def test_a_guidance_processor_of_the_users(model, no_forward):
    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model.target)
    with pytest.raises(ValueError, match="guidance"):
        eagle(
            model, prompt([5]), max_new_tokens=3, logits_processor=LogitsProcessorList([processor])
        )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("eagle3", "speculative='eagle3'"),
        (True, "speculative=True"),
        (3, "speculative=3"),
        ({"depth": 3}, "depth"),
        ({"mode": "bush"}, "mode"),
        ({"max_depth": 0}, "max_depth"),
        ({"max_depth": 2.5}, "max_depth"),
        ({"top_k": 99}, "top_k"),
        ({"max_nodes": True}, "max_nodes"),
        ({"sampling": "greedy"}, "sampling"),
    ],
)
def test_unknown_speculative_values_and_fields(model, no_forward, value, message):
    for kwargs in (
        {"speculative": value},
        {"generation_config": GenerationConfig(speculative=value)},
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**prompt([5]), **kwargs)


@pytest.mark.parametrize("speculative", ["eagle4", None])
def test_empty_prompts(model, no_forward, speculative):
    for batch in (1, 2):
        with pytest.raises(ValueError, match="prompt is empty"):
            model.generate(torch.zeros(batch, 0, dtype=torch.long), speculative=speculative)


@pytest.mark.parametrize("speculative", ["eagle4", None])
def test_prompts_longer_than_the_context(model, no_forward, monkeypatch, speculative):
    monkeypatch.setattr(model.target.config, "max_position_embeddings", 8)
    with pytest.raises(ValueError, match="prompt has 9 tokens but the target's context ends at 8"):
        eagle(model, prompt([9, 2], extra=3), max_new_tokens=2, speculative=speculative)


MASKS = {
    "right padding": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "a hole": [[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]],
    "a hole behind padding": [[0, 1, 0, 1, 1], [1, 1, 1, 1, 1]],
    "an empty row": [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("name", list(MASKS))
def test_masks_that_are_not_left_padding(model, no_forward, name):
    inputs = prompt([5, 5]) | {"attention_mask": torch.tensor(MASKS[name])}
    with pytest.raises(ValueError, match="attention_mask"):
        eagle(model, inputs, max_new_tokens=3)


@pytest.mark.parametrize("name", list(MASKS))
def test_without_speculation_transformers_serves_them(model, name):
    inputs = prompt([5, 5]) | {"attention_mask": torch.tensor(MASKS[name])}
    got = eagle(model, inputs, max_new_tokens=6, speculative=None)
    assert got.tolist() == plain(model, inputs, max_new_tokens=6).tolist()


def test_masks_of_the_wrong_shape(model, no_forward):
    for mask in (torch.ones(1, 3), torch.tensor([[0, 1, 1]])):
        inputs = prompt([5]) | {"attention_mask": mask.long()}
        with pytest.raises(ValueError, match="attention_mask"):
            eagle(model, inputs, max_new_tokens=3)


def test_padding_is_found_without_a_mask(model):
    """Transformers takes pad tokens for padding when no mask is given."""
    ids = prompt([5, 2])["input_ids"]
    got = eagle(model, {"input_ids": ids}, max_new_tokens=6)
    assert got.tolist() == plain(model, {"input_ids": ids}, max_new_tokens=6).tolist()
    ids = torch.tensor([[3, 4, 0, 5]])
    with pytest.raises(ValueError, match="pad_token_id inside a prompt"):
        eagle(model, {"input_ids": ids}, max_new_tokens=6)


# -- without speculation everything works as in Transformers ---------------------------------------


def served() -> dict[str, dict[str, Any]]:
    return {
        "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        "beam sampling": {"num_beams": 2, "do_sample": True},
        "sampling without a cache": {"do_sample": True, "use_cache": False, "top_k": 9},
        "assistant": {"assistant_model": shared_target(seed=5)},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "no cache": {"use_cache": False},
        "static cache": {"cache_implementation": "static"},
        "dynamic cache": {"cache_implementation": "dynamic"},
        "guidance": {"guidance_scale": 1.5},
        "positions": {"position_ids": torch.arange(3, 8)[None]},
        "custom": {"custom_generate": lambda model, input_ids, **kwargs: input_ids + 1},
    }


@pytest.mark.parametrize("name", list(served()))
def test_what_transformers_does_without_speculation(model, name):
    inputs = prompt([5])
    kwargs = dict(max_new_tokens=7) | served()[name]
    outs = []
    for generator in (model.target, model):
        torch.manual_seed(3)
        extra = {"speculative": None} if generator is model else {}
        outs.append(generator.generate(**inputs, **copy.copy(kwargs), **extra).tolist())
    assert outs[0] == outs[1]


def test_embeddings_and_attentions_without_speculation(model):
    embeds = model.get_input_embeddings()(prompt([5])["input_ids"]).detach()
    got = model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=5)
    wanted = model.target.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=5)
    assert got.tolist() == wanted.tolist()
    out = eagle(
        model,
        prompt([5]),
        max_new_tokens=3,
        speculative=None,
        return_dict_in_generate=True,
        output_attentions=True,
    )
    assert len(out.attentions) == 3


# -- where the setting may come from ---------------------------------------------------------------


def drafted(model) -> bool:
    stats = model.last_speculation
    return stats is not None and stats.rounds > stats.plain_rounds


def test_speculative_from_argument_config_and_model(model):
    inputs = prompt([5])
    greedy = dict(do_sample=False, max_new_tokens=6)
    wanted = plain(model, inputs, max_new_tokens=6).tolist()

    def run(**kwargs) -> bool:
        assert model.generate(**inputs, **kwargs).tolist() == wanted
        return drafted(model)

    assert not run(**greedy)
    assert run(**greedy, speculative="eagle4")
    assert run(**greedy, speculative={"top_k": 2})
    assert run(**greedy, speculative=SpeculativeConfig(mode="chain"))
    assert run(generation_config=GenerationConfig(speculative="eagle4", **greedy))
    assert run(generation_config=GenerationConfig(speculative={"max_depth": 2}, **greedy))
    assert not run(generation_config=GenerationConfig(**greedy))
    model.generation_config.speculative = "eagle4"
    assert run(**greedy)
    assert run(generation_config=GenerationConfig(**greedy))
    assert not run(**greedy, speculative=None), "the argument wins"
    assert not run(generation_config=GenerationConfig(speculative=None, **greedy))
    config = GenerationConfig(speculative="eagle4", **greedy)
    assert not run(generation_config=config, speculative=None)
    assert config.speculative == "eagle4", "the caller's config is the caller's"


def test_a_generation_config_that_the_user_assigns(model):
    """It has no place for ``speculative``."""
    inputs = prompt([5])
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0)
    wanted = plain(model, inputs, max_new_tokens=6).tolist()
    for speculative in (None, "eagle4"):
        assert model.generate(**inputs, speculative=speculative).tolist() == wanted
    assert drafted(model)
    assert model.generate(**inputs).tolist() == wanted
    assert not drafted(model)


def test_a_generation_config_alone_causes_no_warning(model, caplog):
    import transformers

    transformers.logging.enable_propagation()
    try:
        config = GenerationConfig(do_sample=False, max_new_tokens=3)
        model.generate(**prompt([5]), generation_config=config)
        model.generate(**prompt([5]), generation_config=config, speculative="eagle4")
    finally:
        transformers.logging.disable_propagation()
    assert not [r for r in caplog.records if "deprecated" in r.getMessage()]


def test_a_cache_kind_that_came_with_the_checkpoint_is_no_obstacle(model):
    """Gemma checkpoints ship ``cache_implementation='hybrid'``."""
    inputs = prompt([5])
    wanted = plain(model, inputs, max_new_tokens=6).tolist()
    model.generation_config.cache_implementation = "hybrid"
    assert eagle(model, inputs, max_new_tokens=6).tolist() == wanted
    assert drafted(model)
    assert eagle(model, inputs, max_new_tokens=6, speculative=None).tolist() == wanted


def test_positional_arguments_as_in_transformers(model):
    inputs = prompt([5])["input_ids"]
    processors = LogitsProcessorList()
    config = GenerationConfig(do_sample=False, max_new_tokens=4)
    got = model.generate(inputs, config, processors, speculative="eagle4")
    assert got.tolist() == model.target.generate(inputs, config, processors).tolist()
    assert drafted(model)


def test_a_prompt_from_bos_alone(model):
    config = dict(do_sample=False, max_new_tokens=5, bos_token_id=1)
    wanted = model.target.generate(**config)
    assert model.generate(**config, speculative="eagle4").tolist() == wanted.tolist()


def test_the_vocabulary_of_prompts_is_not_checked_twice(model):
    """A token id beyond the vocabulary fails as it fails in plain decoding."""
    inputs = {"input_ids": torch.tensor([[3, VOCAB + 5]])}
    for generate in (plain, eagle):
        with pytest.raises(IndexError):
            generate(model, inputs, max_new_tokens=2)
