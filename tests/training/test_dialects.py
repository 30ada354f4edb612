"""Can catch: a dialect that is read as another, turns or tools that are dropped, a bad row that is
not named with its place."""

import json

import pytest

from eagle4.training.dialects import Conversation, Tokens, parse_row, read_files

TURNS = [("user", "w1 w2"), ("assistant", "w3"), ("user", "w4"), ("assistant", "w5")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}[role], "value": content}
    for role, content in TURNS
]


@pytest.mark.parametrize(
    "row", [{"conversations": MESSAGES}, {"messages": MESSAGES}, {"conversations": SHAREGPT}]
)
def test_all_forms_are_one_conversation(row):
    found = parse_row({"id": 3, **row})
    assert found == Conversation(MESSAGES)
    assert found.question() == Conversation(MESSAGES[:3])


def test_tools_and_their_results_are_kept():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "w8", "name": "f", "tool_call_id": "1"}
    for given in (tools, json.dumps(tools)):
        found = parse_row({"messages": [MESSAGES[0], call, result], "tools": given})
        assert found.tools == tools
        assert found.messages[1] == {**call, "content": ""} and found.messages[2] == result
        # an answer follows the tool's result
        assert found.question() == found


def test_thinking_stays_with_its_turn():
    turn = {"role": "assistant", "content": "w3", "reasoning_content": "w7 w7"}
    assert parse_row({"messages": [MESSAGES[0], turn]}).messages[1] == turn


def test_prepared_tokens():
    assert parse_row({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}) == Tokens(
        [5, 6, 7], [False, True, True]
    )


def test_a_conversation_without_a_question_has_none():
    assert parse_row({"messages": [{"role": "system", "content": "w1"}]}).question() is None


@pytest.mark.parametrize(
    "row",
    [
        {},
        [],
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": ["w1"]},
        {"messages": MESSAGES, "tools": 3},
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, -2], "loss_mask": [1, 1]},
        {"input_ids": [1, 2], "loss_mask": [1, 2]},
    ],
)
def test_unknown_rows_are_refused_with_their_place(row):
    with pytest.raises(ValueError, match="file:3"):
        parse_row(row, "file:3")


def test_files_name_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n\n{broken\n")
    files = read_files([path])
    assert next(files) == ("rows", f"{path}:1", Conversation(MESSAGES))
    with pytest.raises(ValueError, match="rows.jsonl:3: not JSON"):
        next(files)
    with pytest.raises(ValueError, match="missing.jsonl is not a file"):
        list(read_files([tmp_path / "missing.jsonl"]))
