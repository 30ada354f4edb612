"""Catches: a prompt format read wrongly, recorded answers leaking into the context, batches padded
on the wrong side, a bad row that is skipped in silence."""

from __future__ import annotations

import json

import pytest
import tiny

from eagle4.evaluation.prompts import (
    BUILT_IN,
    Prompt,
    batched,
    encode,
    iterate_turns,
    load_prompts,
    messages,
)


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_every_documented_form_is_read(tmp_path):
    path = write(
        tmp_path / "prompts.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"id": "a", "conversations": [{"role": "user", "content": "hello"}]},
        "",
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "first"},
                {"role": "assistant", "content": "recorded"},
                {"role": "user", "content": "second"},
            ]
        },
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"prompt": "plain"},
    )
    prompts = load_prompts(path)
    assert prompts[0] == Prompt(prompt_id="81", category="writing", turns=("one", "two"))
    assert [prompt.turns for prompt in prompts[1:]] == [
        ("hello",),
        ("first", "second"),
        ("hi",),
        ("plain",),
    ]
    assert prompts[2].system == "be brief"
    assert [prompt.prompt_id for prompt in load_prompts(path, limit=2)] == ["81", "a"]


def test_text_files_hold_one_prompt_per_line(tmp_path):
    prompts = load_prompts(write(tmp_path / "p.txt", "first line", "", "second {line}"))
    assert [prompt.turns[0] for prompt in prompts] == ["first line", "second {line}"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", r"p.jsonl:2 is not JSON"),
        ("[1]", r"p.jsonl:2 is not a JSON object"),
        ({"text": "x"}, r"p.jsonl:2 has keys \['text'\]"),
        ({"turns": []}, r"p.jsonl:2 has an empty"),
        ({"turns": ["ok", ""]}, r"p.jsonl:2 has an empty"),
        ({"turns": [3]}, r"p.jsonl:2 has an empty"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, r"p.jsonl:2 has an empty"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write(tmp_path / "p.jsonl", {"turns": ["fine"]}, row))


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no prompts"):
        load_prompts(write(tmp_path / "p.jsonl", ""))


def test_messages_alternate_and_end_with_the_open_turn():
    prompt = Prompt(prompt_id="x", turns=("w1", "w2"), system="w0")
    assert [m["role"] for m in messages(prompt, [])] == ["system", "user"]
    assert messages(prompt, ["w9"])[1:] == [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w9"},
        {"role": "user", "content": "w2"},
    ]


def test_batches_are_padded_on_the_left_whatever_the_tokenizer_says():
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.padding_side = "right"
    talks = [[{"role": "user", "content": text}] for text in ("w1", "w1 w2 w3")]
    batch = encode(tokenizer, talks)
    alone = encode(tokenizer, talks[:1])
    assert batch["attention_mask"][0].tolist() == [0, 0] + [1] * alone["input_ids"].shape[1]
    assert batch["input_ids"][0, 2:].tolist() == alone["input_ids"][0].tolist()
    assert tokenizer.padding_side == "right"


def test_without_a_chat_template_the_text_is_used_as_it_is():
    tokenizer = tiny.tiny_tokenizer(chat=False)
    batch = encode(tokenizer, [[{"role": "user", "content": "w1 w2"}]])
    assert tokenizer.decode(batch["input_ids"][0]) == "w1 w2"
    assert set(batch) == {"input_ids", "attention_mask"}


def test_turns_continue_with_the_given_answers(tokenizer):
    batch = [Prompt(prompt_id="x", turns=("w1", "w2")), Prompt(prompt_id="y", turns=("w3", "w4"))]
    seen = []
    for turn in iterate_turns(batch, tokenizer, max_turns=5):
        seen.append([tokenizer.decode(turn.prefix(row)) for row in range(2)])
        turn.answers = [tokenizer.encode("w8 </s>"), tokenizer.encode("w9")]
    assert len(seen) == 2
    assert seen[1] == [
        "<s> user w1 </s> <s> assistant w8 </s> <s> user w2 </s> <s> assistant",
        "<s> user w3 </s> <s> assistant w9 </s> <s> user w4 </s> <s> assistant",
    ]


def test_batches_cover_every_prompt_once():
    assert [prompt for batch in batched(BUILT_IN, 3) for prompt in batch] == list(BUILT_IN)
