"""Can catch: answers that differ from plain decoding's, that include padding or miss the end of
turn, a resumed run that repeats, changes or corrupts rows, a clock that does not stop it."""

import time

import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer

from eagle4 import Eagle4Config, Eagle4Drafter, Eagle4ForCausalLM
from eagle4.training.answers import end_ids, regenerate
from eagle4.training.jsonl import read_rows
from eagle4.training.prompts import Prompt
from eagle4.training.sequences import training_sequences

ENDS = [7, 20, 33, 50]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(eos_token_id=ENDS)


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def prompts(count):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        ids = torch.randint(8, 90, (3 + i % 4,), generator=generator).tolist()
        yield Prompt(f"p{i}", ids, "test")


def rows(path):
    return {row["id"]: row for row in read_rows(path)}


def test_answers_equal_single_generation_and_end_at_eos(tmp_path, model, tokenizer):
    path = tmp_path / "rows.jsonl"
    options = dict(max_new_tokens=12, temperatures=(0.0,), num_rows=4)
    assert regenerate(model, tokenizer, prompts(9), path, **options) == len(rows(path)) == 9
    for prompt in prompts(9):
        answer = rows(path)[prompt.id]["response_ids"]
        ids = torch.tensor([prompt.ids])
        out = model.generate(ids, do_sample=False, max_new_tokens=12)[0, len(prompt.ids) :].tolist()
        assert answer == out and not set(answer[:-1]) & set(ENDS)


@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 0.8)])
def test_a_drafter_writes_the_same_answers(tmp_path, model, tokenizer, temperatures):
    options = dict(max_new_tokens=10, temperatures=temperatures)
    regenerate(model, tokenizer, prompts(6), tmp_path / "plain.jsonl", **options)
    regenerate(pair(model), tokenizer, prompts(6), tmp_path / "drafted.jsonl", **options)
    assert rows(tmp_path / "plain.jsonl") == rows(tmp_path / "drafted.jsonl")


def test_a_drafter_ends_loops_at_the_same_token(tmp_path, tokenizer):
    model = tiny_llama(eos_token_id=[7])
    asked = [Prompt(str(i), [9 + i, 30], "test") for i in range(6)]
    options = dict(max_new_tokens=90, temperatures=(0.0,), max_repeated=5)
    regenerate(model, tokenizer, asked, tmp_path / "plain.jsonl", **options)
    regenerate(pair(model), tokenizer, asked, tmp_path / "drafted.jsonl", **options)
    found = rows(tmp_path / "plain.jsonl")
    assert found == rows(tmp_path / "drafted.jsonl")
    answers = [row["response_ids"] for row in found.values()]
    assert any(len(answer) < 90 and answer[-1] != 7 for answer in answers)


def pair(model):
    torch.manual_seed(0)
    config = Eagle4Config.for_target(model.config, candidate_rank=8, num_candidates=16)
    return Eagle4ForCausalLM(model, Eagle4Drafter(config), tiny_tokenizer())


def test_resume_continues_and_survives_a_cut_line(tmp_path, model, tokenizer):
    options = dict(max_new_tokens=6, num_rows=2, temperatures=(0.0, 0.8))
    regenerate(model, tokenizer, prompts(6), tmp_path / "straight.jsonl", **options)
    path = tmp_path / "rows.jsonl"
    regenerate(model, tokenizer, list(prompts(6))[:3], path, **options)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "p5", "prompt')
    assert sorted(rows(path)) == ["p0", "p1", "p2"]
    assert regenerate(model, tokenizer, prompts(6), path, **options) == 3
    assert path.read_bytes().startswith(whole)
    assert rows(path) == rows(tmp_path / "straight.jsonl")
    assert regenerate(model, tokenizer, prompts(6), path, **options) == 0


def test_the_clock_ends_a_run_that_can_go_on(tmp_path, model, tokenizer):
    path = tmp_path / "rows.jsonl"
    late = time.monotonic() - 1
    assert regenerate(model, tokenizer, prompts(4), path, deadline=late) == 0
    assert regenerate(model, tokenizer, prompts(4), path, max_new_tokens=3) == 4


def test_temperatures_are_mixed_and_seeds_matter(tmp_path, model, tokenizer):
    found = []
    for seed in (0, 1):
        path = tmp_path / f"{seed}.jsonl"
        options = dict(max_new_tokens=8, temperatures=(0.0, 1.5), seed=seed)
        regenerate(model, tokenizer, prompts(24), path, **options)
        found.append(rows(path))
        assert {row["temperature"] for row in found[-1].values()} == {0.0, 1.5}
    both = [(found[0][key], found[1][key]) for key in found[0]]
    sampled = [(a, b) for a, b in both if a["temperature"] == b["temperature"] == 1.5]
    assert sampled and any(a["response_ids"] != b["response_ids"] for a, b in sampled)


def test_training_sequences_mask_the_answer(tmp_path, model, tokenizer):
    path = tmp_path / "rows.jsonl"
    regenerate(model, tokenizer, prompts(4), path, max_new_tokens=8)
    for ids, mask, info in training_sequences(path, min_response_tokens=1):
        row = rows(path)[info["id"]]
        assert ids.tolist() == row["prompt_ids"] + row["response_ids"]
        assert int(mask.sum()) == len(row["response_ids"]) and not mask[: -int(mask.sum())].any()


def test_the_tokenizer_helps_where_the_model_knows_no_end(tokenizer):
    assert end_ids(tiny_llama(eos_token_id=[9, 4]), tokenizer) == [4, 9]
    assert end_ids(tiny_llama(), tokenizer) == [tokenizer.eos_token_id]
    assert end_ids(tiny_llama()) == []
