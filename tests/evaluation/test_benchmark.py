"""Catches: wrong arithmetic (means of ratios for ratios of means, unweighted accept lengths), an
arm that always runs first, warm-up counted, conversations that continue with different answers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from eagle4.evaluation.arms import ArmRun
from eagle4.evaluation.benchmark import (
    BenchConfig,
    Cell,
    cell_record,
    pool_speculation,
    rotated,
    run_benchmark,
    summarise,
)
from eagle4.evaluation.prompts import Prompt
from eagle4.evaluation.report import benchmark_markdown, markdown_table, write_files


def run(count: int, seconds: float, speculation: dict[str, Any] | None = None) -> ArmRun:
    return ArmRun([list(range(count))], seconds, speculation)


def stats(rounds: int, accept_length: float, by_depth: list[float]) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "target_calls": rounds + 1,
        "accept_length": accept_length,
        "acceptance_by_depth": by_depth,
        "nodes_drafted": 48 * rounds,
        "nodes_verified": 16 * rounds,
        "seconds": {"draft": 0.25, "verify": 0.5},
        "plain_rounds": 0,
        "fallbacks": {"memory": 1},
    }


def cell(prompt_id: str, category: str = "all", **runs: list[ArmRun]) -> Cell:
    return Cell(prompt_ids=[prompt_id], category=category, turn=1, context=8, runs=dict(runs))


@pytest.fixture
def cells() -> list[Cell]:
    return [
        cell(
            "a",
            "writing",
            plain=[run(10, 3.0), run(10, 1.0), run(10, 2.0)],
            eagle4=[run(10, 1.0, stats(5, 2.0, [0.8, 0.5]))] * 3,
        ),
        cell(
            "b",
            "math",
            plain=[run(30, 2.0)] * 3,
            eagle4=[run(30, 2.0, stats(15, 4.0, [0.4]))] * 3,
        ),
        cell(
            "c",
            "math",
            plain=[run(20, 4.0)] * 3,
            eagle4=[run(24, 1.2, stats(10, 1.0, []))] * 3,
        ),
    ]


def test_speed_is_total_tokens_over_total_median_seconds(cells):
    table = summarise(cells)["all"]
    assert table["plain"]["tokens_per_s"] == pytest.approx(60 / 8, abs=0.01)
    assert table["eagle4"]["tokens_per_s"] == pytest.approx(64 / 4.2, abs=0.01)


def test_the_ratio_is_the_median_of_paired_quotients(cells):
    table = summarise(cells)["all"]
    # Per cell: 10/5 = 2, 15/15 = 1, 20/5 = 4.
    assert table["eagle4"]["ratio_to_plain"] == 2.0
    assert table["plain"]["ratio_to_plain"] == 1.0
    assert table["eagle4"]["cells_equal_to_plain"] == 2
    assert "ratio_to_transformers" not in table["eagle4"]


def test_accept_length_is_weighted_by_rounds(cells):
    pooled = summarise(cells)["all"]["eagle4"]
    assert pooled["accept_length"] == pytest.approx((5 * 2 + 15 * 4 + 10 * 1) / 30, abs=1e-4)
    assert pooled["acceptance_by_depth"] == pytest.approx([(5 * 0.8 + 15 * 0.4) / 20, 0.5])
    assert pooled["target_calls"] == 33 and pooled["rounds"] == 30
    assert pooled["fallbacks"] == {"memory": 3}
    assert pooled["seconds_by_stage"] == {"draft": 0.75, "verify": 1.5}


def test_exact_denominators_are_used_where_the_engine_gives_them():
    first = stats(5, 2.0, [0.8, 0.5]) | {"verifications": 10, "drafted_by_depth": [10, 2]}
    second = stats(5, 4.0, [0.4, 0.0]) | {"verifications": 30, "drafted_by_depth": [30, 6]}
    pooled = pool_speculation([first, second])
    assert pooled["accept_length"] == pytest.approx(3.5)
    assert pooled["acceptance_by_depth"] == pytest.approx([0.5, 0.125])


def test_plain_rounds_do_not_weigh_in():
    mixed = stats(10, 3.0, [0.5]) | {"plain_rounds": 9}
    pooled = pool_speculation([mixed, stats(3, 1.0, [0.1])])
    assert pooled["accept_length"] == pytest.approx(1.5)
    assert pool_speculation([stats(4, 1.0, []) | {"plain_rounds": 4}])["accept_length"] == 1.0


def test_categories_are_summarised_separately(cells):
    summary = summarise(cells)
    assert set(summary) == {"all", "writing", "math"}
    assert summary["math"]["eagle4"]["cells"] == 2
    assert set(summarise(cells[1:])) == {"all"}


def test_runs_without_rounds_do_not_count():
    assert pool_speculation([None, {"rounds": 0}]) == {}


class Arms:
    """Scripted arms that note the order of calls."""

    def __init__(self, *names: str):
        self.calls: list[str] = []
        self.contexts: list[list[int]] = []
        self.arms = {name: self._arm(name) for name in names}

    def _arm(self, name: str):
        clock = itertools.count(1)

        def arm(inputs, max_new_tokens):
            self.calls.append(name)
            self.contexts.append(inputs["input_ids"][0].tolist())
            tokens = [[7 + len(name)] * max_new_tokens for _ in inputs["input_ids"]]
            return ArmRun(tokens, float(next(clock)), None)

        return arm


def test_every_arm_takes_every_place_and_warm_up_is_dropped(tokenizer):
    scripted = Arms("transformers", "plain", "eagle4")
    prompts = [Prompt(prompt_id=str(i), turns=("w1",)) for i in range(3)]
    config = BenchConfig(max_new_tokens=2, warmup=1)
    cells = run_benchmark(scripted.arms, prompts, tokenizer, config)
    assert len(cells) == 3
    assert scripted.calls[:3] == ["transformers", "plain", "eagle4"]
    measured = [scripted.calls[start : start + 3] for start in (3, 6, 9)]
    assert [order[0] for order in measured] == ["transformers", "plain", "eagle4"]
    assert all(sorted(order) == sorted(scripted.arms) for order in measured)
    # The warm-up took the first reading of every clock.
    assert cells[0].seconds("plain") == 2.0


def test_all_arms_see_the_reference_arms_answers(tokenizer):
    scripted = Arms("plain", "eagle4")
    prompts = [Prompt(prompt_id="x", turns=("w1", "w2"))]
    config = BenchConfig(max_new_tokens=3, warmup=0, max_turns=2, repeats=2)
    cells = run_benchmark(scripted.arms, prompts, tokenizer, config)
    assert [c.turn for c in cells] == [1, 2]
    second = scripted.contexts[4:]
    assert len(second) == 4 and all(context == second[0] for context in second)
    assert tokenizer.decode(second[0]).count("w5 w5 w5") == 1


def test_batches_share_one_call(tokenizer):
    scripted = Arms("plain")
    prompts = [Prompt(prompt_id=str(i), turns=("w1",)) for i in range(5)]
    config = BenchConfig(max_new_tokens=2, warmup=0, batch_size=2)
    cells = run_benchmark(scripted.arms, prompts, tokenizer, config)
    assert [c.prompt_ids for c in cells] == [["0", "1"], ["2", "3"], ["4"]]
    assert cells[0].tokens_per_s("plain") == 4.0


def test_the_reference_must_be_measured(tokenizer):
    with pytest.raises(ValueError, match="reference"):
        run_benchmark(Arms("eagle4").arms, [Prompt(prompt_id="x", turns=("w1",))], tokenizer)


@pytest.mark.parametrize("name", ["max_new_tokens", "batch_size", "max_turns", "repeats"])
def test_counts_start_at_one(name):
    with pytest.raises(ValueError, match=name):
        BenchConfig(**{name: 0})


def test_rotation_keeps_the_names():
    assert [rotated(["a", "b", "c"], step)[0] for step in range(4)] == ["a", "b", "c", "a"]


def test_files_are_readable_by_people_and_programs(cells, tmp_path):
    result = {
        "setup": {"target": "tiny"},
        "environment": {"commit": "abc", "versions": {"torch": "2"}},
        "summary": summarise(cells),
        "cells": [cell_record(c) for c in cells],
    }
    paths = write_files(tmp_path / "new" / "bench.v1", result, benchmark_markdown(result))
    assert [path.name for path in paths] == ["bench.v1.json", "bench.v1.md"]
    assert json.loads(paths[0].read_text())["cells"][0]["runs"]["plain"][0]["seconds"] == 3.0
    text = paths[1].read_text()
    assert "x plain" in text and "2.00" in text and "| math" in text and "depth 2" in text


def test_table_columns_line_up():
    lines = markdown_table(["a", "bb"], [["x|y", 1], ["long value", 22]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and "x\\|y" in lines[2]
