"""Can catch: prompts built without the chat template, answers that include padding or miss the end
of turn, a resumed run that repeats or corrupts rows, synthetic turns without a header."""

import json

import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer

from eagle4.training.data import (
    Prompt,
    conversation,
    read_prompts,
    read_rows,
    regenerate,
    synthesize_prompts,
    training_sequences,
    user_header,
)

TURNS = [("user", "w1 w2"), ("assistant", "w3"), ("user", "w4"), ("assistant", "w5")]


@pytest.fixture(scope="module")
def model():
    # token 7 is drawn often enough to end some answers early
    return tiny_llama(eos_token_id=7)


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def prompts(count):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        ids = torch.randint(8, 90, (3 + i % 4,), generator=generator).tolist()
        yield Prompt(f"p{i}", ids, "test")


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"role": r, "content": c} for r, c in TURNS]},
        {"messages": [{"role": r, "content": c} for r, c in TURNS]},
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[r], "value": c} for r, c in TURNS
            ]
        },
    ],
)
def test_all_row_forms_end_with_the_last_user_turn(row):
    wanted = [{"role": r, "content": c} for r, c in TURNS[:3]]
    assert conversation(row) == wanted


@pytest.mark.parametrize("row", [{}, {"messages": []}, {"messages": [{"role": "user"}]}])
def test_unknown_rows_are_refused_with_their_place(row):
    with pytest.raises(ValueError, match="file:3"):
        conversation(row, "file:3")


def test_prompts_use_the_template_and_the_length_limit(tmp_path, tokenizer):
    rows = [{"messages": [{"role": "user", "content": " ".join(["w3"] * n)}]} for n in (2, 50)]
    path = tmp_path / "some_prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (found,) = read_prompts([path], tokenizer, max_prompt_tokens=20)
    assert tokenizer.decode(found.ids) == "<s> user w3 w3 </s> <s> assistant"
    assert found.kind == "some_prompts"


def test_answers_equal_single_generation_and_end_at_eos(tmp_path, model, tokenizer):
    path = tmp_path / "rows.jsonl"
    added = regenerate(
        model, tokenizer, prompts(9), path, max_new_tokens=12, temperatures=(0.0,), batch_size=4
    )
    rows = {row["id"]: row for row in read_rows(path)}
    assert added == len(rows) == 9
    for prompt in prompts(9):
        answer = rows[prompt.id]["response_ids"]
        ids = torch.tensor([prompt.ids])
        out = model.generate(ids, do_sample=False, max_new_tokens=12)[0, len(prompt.ids) :].tolist()
        assert answer == out and 7 not in answer[:-1]


def test_resume_skips_rows_and_survives_a_cut_line(tmp_path, model, tokenizer):
    path = tmp_path / "rows.jsonl"
    options = dict(max_new_tokens=6, batch_size=2)
    regenerate(model, tokenizer, list(prompts(6))[:3], path, **options)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "p5", "prompt')
    assert [row["id"] for row in read_rows(path)] == [r["id"] for r in read_rows(path)]
    assert regenerate(model, tokenizer, prompts(6), path, **options) == 3
    assert path.read_bytes().startswith(whole)
    assert sorted(row["id"] for row in read_rows(path)) == [f"p{i}" for i in range(6)]
    assert regenerate(model, tokenizer, prompts(6), path, **options) == 0


def test_temperatures_are_mixed(tmp_path, model, tokenizer):
    path = tmp_path / "rows.jsonl"
    regenerate(model, tokenizer, prompts(24), path, max_new_tokens=3, temperatures=(0.0, 0.8))
    assert {row["temperature"] for row in read_rows(path)} == {0.0, 0.8}


def test_synthetic_turns_follow_the_header(model, tokenizer):
    head, tail = user_header(tokenizer)
    assert tokenizer.decode(head) == "<s> user" and tail == " </s> <s> assistant"
    found = synthesize_prompts(
        model, tokenizer, 5, starters=["w9 w8"], batch_size=2, max_new_tokens=5
    )
    assert 0 < len(found) <= 5
    for prompt in found:
        text = tokenizer.decode(prompt.ids)
        assert text.startswith("<s> user w9 w8") and text.endswith("</s> <s> assistant")


def test_training_sequences_mask_the_answer(tmp_path, model, tokenizer):
    path = tmp_path / "rows.jsonl"
    regenerate(model, tokenizer, prompts(4), path, max_new_tokens=8)
    rows = {row["id"]: row for row in read_rows(path)}
    for ids, mask, info in training_sequences(path, min_response_tokens=1):
        row = rows[info["id"]]
        assert ids.tolist() == row["prompt_ids"] + row["response_ids"]
        assert int(mask.sum()) == len(row["response_ids"]) and not mask[: -int(mask.sum())].any()
