"""Can catch: answers of two targets, templates or styles in one folder; statistics that hide
answers without an end or a mask that covers nothing."""

import json

import pytest
from tiny import tiny_llama

from eagle4.training.jsonl import append_row
from eagle4.training.manifest import (
    add_statistics,
    check_made_by,
    describe,
    made_by,
    weights_fingerprint,
)

IDENTITY = {"model_type": "llama", "tap_layers": [0, 1, 2]}


def made(target=None, template="abc", **settings):
    return made_by(target or tiny_llama(), IDENTITY, template, {"max_new_tokens": 8, **settings})


def test_the_same_call_passes_again(tmp_path):
    check_made_by(tmp_path / "new", made())
    check_made_by(tmp_path / "new", made())


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: made(template="xyz"), "template"),
        (lambda: made(max_new_tokens=9), "settings.max_new_tokens: 8 -> 9"),
        (lambda: made(tiny_llama(seed=1)), "target.weights"),
        (lambda: made(tiny_llama().bfloat16()), "target.dtype"),
    ],
)
def test_another_call_is_refused_by_name(tmp_path, other, named):
    check_made_by(tmp_path, made())
    with pytest.raises(ValueError, match=named):
        check_made_by(tmp_path, other())


def test_fine_tunes_differ_in_their_fingerprint():
    target = tiny_llama()
    before = weights_fingerprint(target)
    assert before == weights_fingerprint(tiny_llama())
    target.model.layers[2].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert before != weights_fingerprint(target)


def test_statistics_count_ends_and_masks(tmp_path):
    responses = tmp_path / "responses.jsonl"
    check_made_by(tmp_path, made())
    for i, answer in enumerate(([9, 9, 9, 2], [9] * 6, [9, 9])):
        row = {"id": str(i), "prompt_ids": [5] * 4, "response_ids": answer}
        append_row(responses, {**row, "kind": "a" if i else "b", "temperature": 0.0})
    found = add_statistics(tmp_path, responses, [2])
    assert found["sequences"] == 2, "an answer of two tokens is left out"
    assert found["tokens"] == 18 and found["supervised"] == 10 and found["ended"] == 1
    assert found["supervised_share"] == pytest.approx(10 / 18, abs=1e-4)
    assert found["kinds"]["b"]["ended"] == 1 and found["kinds"]["a"]["tokens"] == 10
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["statistics"] == found and manifest["made_by"]["template"] == "abc"
    assert "2 sequences" in describe(found)
