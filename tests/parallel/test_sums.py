"""Catches: ranks that add up in different ways, or wait for one that gave up; a kernel that is
handed what it cannot take; sums that differ from the reference; a size that splits a compiled
graph. PyTorch's kernel itself needs several GPUs, so a stand-in with its demands takes its place.
"""

from __future__ import annotations

import pytest
import torch

from eagle4.ops.rank_sum import rank_sum
from eagle4.parallel.sums import check_place
from tests.parallel import fused, one_shot
from tests.parallel.world import run_world

SMALL = ["rows", "bf16", "view with an offset", "columns", "transposed", "as large as possible"]
STEPS = ["place", "allocate", "rendezvous", "kernel"]
FUSED_STEPS = ["allocate", "rendezvous", "compile", "kernel"]


@pytest.mark.parametrize("size", [2, 3])
def test_small_parts_go_through_the_kernel_and_all_sums_are_right(size):
    for found in run_world(size, one_shot.sums):
        assert found["by kernel"] == SMALL and not found["wrong"]


def test_a_compiled_layer_is_one_graph_whatever_the_size():
    assert run_world(2, one_shot.graphs) == [1, 1]


def test_where_everything_works_all_ranks_use_it():
    for found in run_world(2, one_shot.choice, ""):
        assert (found["impl"], found["sums"]) == ("one_shot", "one-shot")
        assert found["steps"] == STEPS and not found["logged"]
        assert found["total"] == [2.0, 2.0] and found["scratch"] == 1
        assert found["scratch after leaving"] == 0


@pytest.mark.parametrize("step", ["place", "allocate", "rendezvous", "sum"])
def test_one_rank_that_cannot_keeps_all_of_them_from_it(step):
    results = run_world(2, one_shot.choice, step)
    for found in results:
        assert (found["impl"], found["sums"]) == ("torch", "gloo")
        taken = STEPS if step == "sum" else STEPS[: STEPS.index(step) + 1]
        assert found["steps"] == taken, "nobody goes on after a failure"
        assert found["total"] == [2.0, 2.0] and found["scratch"] == 0
    reason = "are wrong" if step == "sum" else f"no {step} here"
    assert len(results[0]["logged"]) == 1 and reason in results[0]["logged"][0]
    assert not results[1]["logged"], "one rank says it"


def test_answers_are_those_of_one_process_and_the_report_says_how():
    alone = one_shot.generation(None)
    for found in run_world(2, one_shot.generation):
        assert found["ids"] == alone["ids"]
        assert found["sums"] == "one-shot" and found["kernels"] > 10


def test_where_kernels_work_all_ranks_fuse_norms_with_sums(tmp_path):
    for found in run_world(2, fused.choice, str(tmp_path), ""):
        assert found["fused"] and found["sums"] == "one-shot, fused with norms"
        assert found["steps"] == FUSED_STEPS and not found["logged"]
        assert found["hidden"] == [[3.0] * 4] and found["bytes"] == 16
        assert found["memory"] == (1, 1) and found["memory after leaving"] == (0, 0)


@pytest.mark.parametrize("step", ["asking", "allocate", "rendezvous", "compile", "norm"])
def test_one_rank_that_cannot_fuse_leaves_all_with_one_shot_sums(step, tmp_path):
    results = run_world(2, fused.choice, str(tmp_path), step)
    for found in results:
        assert not found["fused"] and found["sums"] == "one-shot"
        taken = {"asking": [], "norm": FUSED_STEPS}
        wanted = taken.get(
            step, FUSED_STEPS[: FUSED_STEPS.index(step) + 1] if step in FUSED_STEPS else []
        )
        assert found["steps"] == wanted, "nobody goes on after a failure"
        assert found["hidden"] == [[3.0] * 4] and found["memory"] == (0, 0)
    if step == "asking":
        assert not results[0]["logged"], "nobody asked, so nobody is warned"
        return
    reason = "are wrong" if step == "norm" else f"no {step} here"
    assert len(results[0]["logged"]) == 1 and reason in results[0]["logged"][0]
    assert not results[1]["logged"], "one rank says it"


def test_a_compiled_block_is_one_graph_whatever_the_size(tmp_path):
    assert run_world(2, fused.graphs, str(tmp_path)) == [1, 1]


def test_a_split_drafter_goes_on_with_its_norms_and_drafts_the_same(tmp_path):
    alone = fused.generation(None, "")
    for found in run_world(2, fused.generation, str(tmp_path)):
        with_norms, without = found[True], found[False]
        assert with_norms["ids"] == without["ids"] == alone[True]["ids"]
        assert with_norms["sums"] == "one-shot, fused with norms" and without["sums"] == "one-shot"
        # Behind attention and behind the MLP, whenever the drafter's block runs.
        assert with_norms["kernels"] == 2 * with_norms["blocks"] > 10
        assert without["kernels"] == 0 and with_norms["bytes"] == without["bytes"]


@pytest.mark.parametrize(
    ("places", "reads", "reason"),
    [
        ([("a", 0), ("a", 1)], True, None),
        ([("a", 0), ("a", 0)], False, None),  # one visible GPU each: the rendezvous decides
        ([("a", None), ("a", None)], False, None),
        ([("a", 0), ("b", 0)], True, "several hosts"),
        ([("a", 0), ("a", 3)], False, r"GPU 0 cannot read the memory of \[3\]"),
    ],
)
def test_peers_must_be_able_to_read_each_other(places, reads, reason):
    if reason is None:
        check_place(places, 0, lambda mine, other: reads)
    else:
        with pytest.raises(RuntimeError, match=reason):
            check_place(places, 0, lambda mine, other: reads)


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("EAGLE4_ONE_SHOT", "0")
    with pytest.raises(RuntimeError, match="EAGLE4_ONE_SHOT=0"):
        check_place([("a", 0), ("a", 1)], 0, lambda mine, other: True)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="pass one of torch, one_shot"):
        rank_sum(torch.ones(2), "group", "nvls")
