"""Catches: a wrong arm that is waved through, a near tie that is called wrong, equally bad tokens
excused as a tie, a check that proves nothing because nothing was speculated."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

from eagle4.evaluation.arbiter import Arbiter, Arbitration, chunked_logits, one_pass_logits
from eagle4.evaluation.arms import ArmRun, make_arms
from eagle4.evaluation.lossless import LENGTH, NEAR_TIE, UNEXPLAINED, check_lossless
from eagle4.evaluation.lossless import first_difference as difference
from eagle4.evaluation.prompts import Prompt
from eagle4.evaluation.report import lossless_markdown, lossless_record

PROMPTS = [Prompt(prompt_id=f"p{i}", turns=(f"w{i} w{i + 1}",)) for i in range(3)]
STATS = {
    "rounds": 1,
    "target_calls": 1,
    "accept_length": 2.0,
    "acceptance_by_depth": [0.5],
    "nodes_drafted": 4,
    "nodes_verified": 4,
    "seconds": {},
    "plain_rounds": 0,
    "fallbacks": {},
}


class ScriptedArbiter:
    """Calls everything a near tie, or nothing; notes what it was asked."""

    def __init__(self, is_near: bool):
        self.is_near = is_near
        self.asked = []

    def judge(self, prefix, first, second):
        self.asked.append((list(prefix), first, second))
        gap = 0.1 if self.is_near else 0.9
        return Arbitration(gap=gap, margin=gap, noise=0.5, margins_by_shape={})


def altered(arm, change, stats=STATS):
    """An arm whose tokens are changed on the way out."""

    def run(inputs, max_new_tokens):
        out = arm(inputs, max_new_tokens)
        return ArmRun([change(row) for row in out.tokens], out.seconds, stats)

    return run


def arms_with(target, change, stats=STATS):
    plain = make_arms(None, target, ["transformers"])["transformers"]
    return {"plain": plain, "eagle4": altered(plain, change, stats)}


def wrong_at_two(row):
    return row[:2] + [(row[2] + 1) % 96] + row[3:]


def test_equal_arms_pass(target, tokenizer):
    report = check_lossless(
        arms_with(target, list), PROMPTS, tokenizer, Arbiter(target), max_new_tokens=8
    )
    assert report.is_ok and not report.divergences
    assert report.equal["plain", "eagle4"] == report.compared["plain", "eagle4"] == 3
    assert report.tokens == 24


def test_a_wrong_arm_is_flagged_by_the_real_arbiter(target, tokenizer):
    report = check_lossless(
        arms_with(target, wrong_at_two), PROMPTS, tokenizer, Arbiter(target), max_new_tokens=8
    )
    assert not report.is_ok and len(report.unexplained) == 3
    found = report.divergences[0]
    assert (found.kind, found.position, found.arms) == (UNEXPLAINED, 2, ("plain", "eagle4"))
    assert found.arbitration.gap > 100 * found.arbitration.noise


@pytest.mark.parametrize(("is_near", "kind"), [(True, NEAR_TIE), (False, UNEXPLAINED)])
def test_the_arbiter_decides(target, tokenizer, is_near, kind):
    arbiter = ScriptedArbiter(is_near)
    report = check_lossless(
        arms_with(target, wrong_at_two), PROMPTS, tokenizer, arbiter, max_new_tokens=8
    )
    assert {divergence.kind for divergence in report.divergences} == {kind}
    assert report.is_ok == is_near
    prefix, first, second = arbiter.asked[0]
    assert second == (first + 1) % 96
    answer = target.generate(torch.tensor([prefix]), max_new_tokens=1, do_sample=False)
    assert answer[0, -1] == first, "the prefix must end right before the difference"


def test_stopping_early_is_never_a_tie(target, tokenizer):
    arms = arms_with(target, lambda row: row[:-1])
    report = check_lossless(arms, PROMPTS, tokenizer, ScriptedArbiter(True), max_new_tokens=4)
    assert {d.kind for d in report.divergences} == {LENGTH} and not report.is_ok


def test_equality_without_speculation_proves_nothing(target, tokenizer):
    idle = {**STATS, "nodes_verified": 0, "plain_rounds": 1}
    for stats in (idle, None):
        report = check_lossless(
            arms_with(target, list, stats), PROMPTS, tokenizer, Arbiter(target), max_new_tokens=2
        )
        assert report.idle_arms == ["eagle4"] and not report.is_ok


def test_batches_are_compared_row_by_row_without_padding(target, tokenizer):
    prompts = [*PROMPTS, Prompt(prompt_id="long", turns=("w1 w2 w3 w4 w5",))]
    arbiter = ScriptedArbiter(True)
    report = check_lossless(
        arms_with(target, wrong_at_two), prompts, tokenizer, arbiter, 4, batch_size=4
    )
    assert report.compared["plain", "eagle4"] == 4
    assert all(tokenizer.pad_token_id not in prefix[:1] for prefix, _, _ in arbiter.asked)
    assert len(arbiter.asked[3][0]) == len(arbiter.asked[0][0]) + 3


def test_one_arm_is_not_a_comparison(target, tokenizer):
    with pytest.raises(ValueError, match="two arms"):
        check_lossless({"plain": None}, PROMPTS, tokenizer, ScriptedArbiter(True))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0), ([], [], None)],
)
def test_first_difference(first, second, expected):
    assert difference(first, second) == expected


@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_all_row_shapes_compute_the_same_positions(target, chunk, length):
    ids = torch.arange(length)[None] % 96
    whole = target(input_ids=ids).logits[0, -8:].detach()
    torch.testing.assert_close(one_pass_logits(target, ids, 8), whole)
    torch.testing.assert_close(chunked_logits(target, ids, 8, chunk), whole, atol=1e-4, rtol=1e-4)


def tied_target(difference: float):
    """A target with two LM head rows that are equal up to a factor."""
    target = tiny.tiny_llama()
    with torch.no_grad():
        head = target.lm_head.weight
        head[11] = head[10] * (1 + difference)
    return target


def best_two_are_tied(target):
    """A prefix after which tokens 10 and 11 are the two best."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        ids = torch.randint(0, 96, (1, 6), generator=generator)
        if set(one_pass_logits(target, ids, 1)[0].topk(2).indices.tolist()) == {10, 11}:
            return ids[0].tolist()
    raise AssertionError("no such prefix")


def test_a_tie_of_the_best_two_is_near_in_low_precision():
    target = tied_target(1e-4).to(torch.bfloat16)
    judged = Arbiter(target).judge(best_two_are_tied(target), 10, 11)
    assert judged.is_near_tie and 0 <= judged.gap < 0.05


def test_the_same_margin_is_no_excuse_in_fp32():
    target = tied_target(1e-2)
    judged = Arbiter(target).judge(best_two_are_tied(target), 10, 11)
    assert not judged.is_near_tie and judged.noise < 1e-4


def test_two_equally_bad_tokens_are_not_a_tie(target):
    prefix = [5, 6, 7]
    order = one_pass_logits(target, torch.tensor([prefix]), 1)[0].argsort()
    judged = Arbiter(target).judge(prefix, int(order[0]), int(order[0]))
    assert judged.margin == 0.0 and judged.gap > 0.1 and not judged.is_near_tie


def test_the_arbiter_leaves_the_target_as_it_was():
    target = tiny.tiny_llama().to(torch.bfloat16)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    arbiter = Arbiter(target)
    arbiter.judge([1, 2, 3], 4, 5)
    assert arbiter.exact.dtype == torch.float32 and target.dtype == torch.bfloat16
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


def test_the_report_lists_every_divergence(target, tokenizer):
    report = check_lossless(
        arms_with(target, wrong_at_two), PROMPTS, tokenizer, Arbiter(target), max_new_tokens=4
    )
    record = json.loads(json.dumps(lossless_record(report)))
    assert record["ok"] is False and record["unexplained"] == len(record["divergences"]) == 3
    result = {"setup": {}, "environment": {"versions": {}}}
    text = lossless_markdown(result, report)
    assert "FAILED" in text and all(f"| {prompt.prompt_id} " in text for prompt in PROMPTS)
