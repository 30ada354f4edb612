"""Catches: padding counted as speed, a second EOS id that is not seen, arms that differ in more
than speculation, statistics that are not plain values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
import torch

from eagle4 import config as eagle4_config
from eagle4.evaluation.arms import (
    SPECULATION_FIELDS,
    eos_ids,
    make_arms,
    neutral_arguments,
    new_tokens,
    speculation_fields,
)


class FakeModel:
    """Records the arguments of `generate`."""

    def __init__(self, **generation_config):
        self.generation_config = SimpleNamespace(**{"eos_token_id": [2, 5], **generation_config})
        self.calls = []

    def generate(self, input_ids, **arguments):
        self.calls.append(arguments)
        new = torch.tensor([[7, 5, 0, 0], [7, 8, 9, 9]])[: input_ids.shape[0]]
        stats = {"rounds": 2, "accept_length": torch.tensor(1.5), "fallbacks": {"x": 1}}
        return SimpleNamespace(sequences=torch.cat([input_ids, new], 1), speculation=stats)


def test_tokens_count_up_to_the_first_eos_and_no_padding():
    rows = new_tokens(torch.tensor([[1, 2, 7, 5, 0], [1, 2, 7, 8, 9]]), 2, {2, 5})
    assert rows == [[7, 5], [7, 8, 9]]


@pytest.mark.parametrize(("value", "expected"), [(None, set()), (3, {3}), ([3, 4], {3, 4})])
def test_none_one_or_several_eos(value, expected):
    assert eos_ids(SimpleNamespace(eos_token_id=value)) == expected


def test_arms_differ_in_speculation_only():
    model, target = FakeModel(), FakeModel()
    arms = make_arms(model, target, ["transformers", "plain", "eagle4", "chain"])
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    runs = {name: arm(inputs, 4) for name, arm in arms.items()}
    given = [*target.calls, *model.calls]
    modes = [call.pop("speculative", "absent") for call in given]
    assert given == [given[0]] * 4
    assert given[0]["do_sample"] is False and given[0]["max_new_tokens"] == 4
    assert modes[:2] == ["absent", None]
    assert modes[2] == eagle4_config.SpeculativeConfig()
    assert modes[3].width == 1
    assert runs["eagle4"].tokens == [[7, 5], [7, 8, 9, 9]] and runs["eagle4"].num_tokens == 6
    assert all(run.seconds > 0 for run in runs.values())


def test_sampled_arms_share_settings_and_seed():
    model, target = FakeModel(), FakeModel()
    settings = {"do_sample": True, "temperature": 0.7, "seed": 3}
    names = ["transformers", "plain", "rejection", "rejection-chain"]
    arms = make_arms(model, target, names, decoding=settings)
    for arm in arms.values():
        arm({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, 4)
    configs = [call.pop("speculative") for call in model.calls]
    assert configs[0] is None and [c.sampling for c in configs[1:]] == ["rejection"] * 2
    assert [c.width for c in configs[1:]] == [4, 1]
    assert all(call.items() >= settings.items() for call in model.calls)
    assert "seed" not in target.calls[0] and target.calls[0]["do_sample"]


def test_default_penalties_are_switched_off_by_name():
    assert neutral_arguments(SimpleNamespace(repetition_penalty=1.1, no_repeat_ngram_size=0)) == {
        "repetition_penalty": 1.0
    }
    assert neutral_arguments(SimpleNamespace(repetition_penalty=None)) == {}


def test_unknown_arm_is_named():
    with pytest.raises(ValueError, match="'magic'"):
        make_arms(FakeModel(), FakeModel(), ["plain", "magic"])


@pytest.mark.parametrize("kind", [dict, lambda **values: SimpleNamespace(**values)])
def test_statistics_become_plain_values(kind):
    fields = speculation_fields(kind(rounds=3, acceptance_by_depth=torch.tensor([0.5, 0.25])))
    assert set(fields) == set(SPECULATION_FIELDS)
    assert fields["rounds"] == 3 and fields["acceptance_by_depth"] == [0.5, 0.25]
    assert speculation_fields(None) is None


def test_the_transformers_arm_is_plain_generate(tokenizer):
    target = tiny.tiny_llama()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    run = make_arms(None, target, ["transformers"])["transformers"](inputs, 6)
    expected = target.generate(**inputs, max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    assert run.tokens == [expected] and run.speculation is None
