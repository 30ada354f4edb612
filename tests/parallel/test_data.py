"""Catches: training data of a split target that is not what one process writes, whether begun or
continued; ranks that draw otherwise, look at their own prompts, clocks or files, write files, or
wait for one that failed; whole rows of logits where pairs are enough."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from scripted import small_drafter

from eagle4.cli import main
from eagle4.training import FeatureStore
from tests.parallel import data
from tests.parallel.world import end_of_world, run_world


@pytest.fixture
def words(tmp_path) -> list[str]:
    """`eagle4 data` for tiny files; every rank is told of other prompts."""
    target = data.target()
    target.save_pretrained(tmp_path / "target")
    tiny.tiny_tokenizer(data.VOCAB).save_pretrained(tmp_path / "target")
    small_drafter(target).save_pretrained(tmp_path / "drafter")
    for rank in range(2):
        users = [f"w{20 + 9 * i} w{30 + 7 * i + rank}" for i in range(9)]
        rows = [{"conversations": [{"role": "user", "content": user}]} for user in users]
        (tmp_path / f"prompts-{rank}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["data", "--target", str(tmp_path / "target"), "--dtype", "float32", "--device", "cpu"]
    words += ["--prompts", str(tmp_path / "prompts-@.jsonl"), "--synthesize", "7"]
    words += ["--temperatures", "0", "0.8", "--max-new-tokens", "40", "--max-repeated", "6"]
    return [*words, "--batch-size", "4", "--max-minutes", "60", "--tap-layers", "0", "1", "--out"]


def alone(words: list[str], *more: str) -> None:
    assert main([*(word.replace("@", "0") for word in words), *more]) == 0


def test_two_ranks_write_what_one_process_does(words, tmp_path):
    alone([*words, str(tmp_path / "alone")])
    part = [*words, str(tmp_path / "part"), "--limit", "4", "--synthesize", "3"]
    alone(part)
    with open(tmp_path / "part" / "responses.jsonl", "a") as file:
        file.write('{"id": "cut')
    shutil.copytree(tmp_path / "part", tmp_path / "resumed-0")
    alone([*words, str(tmp_path / "part")])
    drafter = ["--drafter", str(tmp_path / "drafter"), "--no-features"]
    drafter += ["--limit", "4", "--synthesize", "2"]
    first, second = run_world(
        2,
        data.run,
        [*words, str(tmp_path / "new-@")],
        [*words, str(tmp_path / "resumed-@")],
        [*words, str(tmp_path / "drafted-@"), *drafter],
    )
    assert [end["status"] for end in first] == [0, 0, 0], first
    assert not any(end["out"] or end["err"] for end in second)
    assert not list(tmp_path.glob("*-1")), "only the first rank writes"
    compare(tmp_path / "alone", tmp_path / "new-0")
    compare(tmp_path / "part", tmp_path / "resumed-0")
    drafted, wanted = (rows(tmp_path / name) for name in ("drafted-0", "alone"))
    assert len(drafted) == 6 and all(wanted[name] == row for name, row in drafted.items())
    assert len({len(row["response_ids"]) for row in wanted.values()}) > 4


def rows(folder: Path) -> dict[str, dict]:
    lines = (folder / "responses.jsonl").read_text().splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def compare(wanted: Path, found: Path) -> None:
    """The same ids in the same order, the same manifests, features up to a bf16 rounding."""
    for name in ("synthetic.jsonl", "responses.jsonl", "manifest.json", "features/manifest.json"):
        assert (found / name).read_text() == (wanted / name).read_text(), name
    stores = FeatureStore(wanted / "features"), FeatureStore(found / "features")
    assert len(stores[0]) == len(stores[1]) > 8
    for i in range(len(stores[0])):
        assert stores[0].info(i) == stores[1].info(i)
        for a, b in zip(stores[0][i], stores[1][i], strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-5)
            assert (a == b).float().mean() > 0.98


@pytest.mark.parametrize("names", [["greedy", "coupled", "top_k"], list(data.LAWS)])
def test_split_rows_are_drawn_as_whole_ones(names):
    wanted = data.answers(None, names)["answers"]
    assert len({len(answer) for answer in wanted.values()}) > 4
    for own in run_world(2, data.answers, names):
        assert own["answers"] == wanted
        assert ("rows" in own["sent"]) == ("top_p" in names), "whole rows only where needed"


BUG, OTHER = "a bug on one rank", "settings.max_repeated: 5 -> 6"


@pytest.mark.parametrize(("who", "error"), [(0, BUG), (1, BUG), (0, OTHER)])
def test_a_rank_that_fails_ends_the_other(words, tmp_path, who, error):
    if error == OTHER:
        alone([*words, str(tmp_path / "out"), "--max-repeated", "5", "--no-features"])
    line = [word.replace("@", "0") for word in [*words, str(tmp_path / "out")]]
    ended = end_of_world(2, data.fail, who, line)
    first_lines = [(end.error or "").splitlines()[0] for end in ended]
    assert error in first_lines[who]
    assert first_lines[1 - who].startswith(f"RankError: rank {1 - who} of 2 lost the other ranks")
