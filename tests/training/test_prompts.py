"""Can catch: prompts built without the chat template, a row without a question that is answered,
synthetic turns without a header, seeds that give the same turns, a resumed run that repeats or
changes turns."""

import json

import pytest
from tiny import tiny_llama, tiny_tokenizer

from eagle4.target import TargetAdapter
from eagle4.training.jsonl import read_rows
from eagle4.training.prompts import (
    read_prompts,
    read_starters,
    synthesize_prompts,
    user_header,
)


@pytest.fixture(scope="module")
def adapter():
    return TargetAdapter(tiny_llama(eos_token_id=7))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_prompts_use_the_template_and_the_length_limit(tmp_path, tokenizer):
    rows = [{"messages": [{"role": "user", "content": " ".join(["w3"] * n)}]} for n in (2, 50)]
    path = tmp_path / "some_prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (found,) = read_prompts([path], tokenizer, max_prompt_tokens=20)
    assert tokenizer.decode(found.ids) == "<s> user w3 w3 </s> <s> assistant"
    assert found.kind == "some_prompts"


def test_a_row_without_a_question_is_refused_with_its_place(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "w1"}]}))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: no user turn"):
        list(read_prompts([path], tokenizer))


def written(adapter, tokenizer, path, count, **options):
    options = {"ends": [7], "num_rows": 2, "max_new_tokens": 5, **options}
    return synthesize_prompts(adapter, tokenizer, count, path, **options)


def test_synthetic_turns_follow_the_header(tmp_path, adapter, tokenizer):
    assert tokenizer.decode(user_header(tokenizer)) == "<s> user"
    found = written(adapter, tokenizer, tmp_path / "a.jsonl", 5, starters=["w9 w8"])
    assert 0 < len(found) <= 5
    for prompt in found:
        text = tokenizer.decode(prompt.ids)
        assert text.startswith("<s> user w9 w8") and text.endswith("</s> <s> assistant")


def test_turns_continue_and_other_seeds_write_others(tmp_path, adapter, tokenizer):
    straight = written(adapter, tokenizer, tmp_path / "a.jsonl", 9)
    written(adapter, tokenizer, tmp_path / "b.jsonl", 4)
    before = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(before + b'{"id": "0/')
    assert written(adapter, tokenizer, tmp_path / "b.jsonl", 9) == straight
    assert (tmp_path / "b.jsonl").read_bytes().startswith(before)
    assert len(list(read_rows(tmp_path / "b.jsonl"))) == 9
    other = written(adapter, tokenizer, tmp_path / "c.jsonl", 9, seed=1)
    assert not {p.id for p in other} & {p.id for p in straight}


def test_a_template_that_repeats_the_content_is_refused(tokenizer):
    twice = tiny_tokenizer()
    twice.chat_template = "{{ messages[0]['content'] }} {{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="repeats"):
        user_header(twice)


def test_starters_are_lines(tmp_path):
    path = tmp_path / "starters.txt"
    path.write_text("Write\n\nExplain\n")
    assert read_starters(path) == ["Write", "", "Explain"]
    path.write_text("")
    with pytest.raises(ValueError, match="no starter"):
        read_starters(path)
