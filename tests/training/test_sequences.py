"""Can catch: kept answers without their mask, rows kept twice, tokens that the target does not
know, run lengths that do not give the mask back."""

import json

import pytest
from tiny import tiny_tokenizer

from eagle4.training.sequences import (
    keep_answers,
    mask_to_runs,
    runs_to_mask,
    training_sequences,
)

ANSWERED = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3 w4 w5"},
]


@pytest.mark.parametrize("mask", [[], [False], [True], [False, True, True], [True, False, True]])
def test_runs_are_the_mask(mask):
    assert runs_to_mask(mask_to_runs(mask)) == mask


def test_kept_rows_become_sequences_once(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [
        {"messages": ANSWERED},
        {"messages": ANSWERED[:1]},
        {"input_ids": [8, 9, 10, 11, 12, 13], "loss_mask": [0, 1, 1, 1, 0, 1]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "responses.jsonl"
    assert keep_answers([path], tokenizer, out, [tokenizer.eos_token_id], 96) == 2
    assert keep_answers([path], tokenizer, out, [tokenizer.eos_token_id], 96) == 0
    (ids, mask, info), (prepared, marks, _) = training_sequences(out)
    assert tokenizer.decode(ids[mask]) == "w3 w4 w5 </s>" and info["kind"] == "rows"
    assert prepared.tolist() == rows[2]["input_ids"]
    assert marks.int().tolist() == rows[2]["loss_mask"]


def test_short_answers_are_left_out_and_long_ones_cut(tmp_path):
    path, out = tmp_path / "rows.jsonl", tmp_path / "responses.jsonl"
    rows = [{"input_ids": list(range(8, 8 + n)), "loss_mask": [0] + [1] * (n - 1)} for n in (3, 30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    keep_answers([path], tiny_tokenizer(), out, [], 96)
    ((ids, mask, _),) = training_sequences(out, max_tokens=20)
    assert len(ids) == len(mask) == 20


def test_unknown_tokens_are_refused_with_their_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [5, 96], "loss_mask": [1, 1]}))
    with pytest.raises(ValueError, match="rows.jsonl:1: token 96"):
        keep_answers([path], tiny_tokenizer(), tmp_path / "out.jsonl", [], 96)
