"""Can catch: a log that cannot be drawn, steps that a resumed run repeated and that count twice, a
last line that a kill has cut."""

import importlib.util
import json

import pytest

from eagle4.training.curves import draw_curves, read_log


def write_log(folder, with_load):
    held_out = {"kl": [0.5, 0.6], "tau_chain": 2.0, "tau_walk": 1.8, "tau_measured": 1.9}
    records = [{"step": i, "seconds": i, "loss": 5.0 / i} for i in range(1, 6)]
    if with_load:
        records = [{**record, "expert_load": 1.5} for record in records]
    records.insert(2, {"step": 2, "seconds": 2, "held_out": held_out})
    records.append({"step": 4, "seconds": 9, "loss": 0.25})
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "log.jsonl").write_text("".join(lines) + '{"step": 5, "lo')  # a kill cut the last


def test_repeated_steps_count_once(tmp_path):
    write_log(tmp_path, with_load=False)
    steps, evaluations = read_log(tmp_path)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    assert steps[3]["loss"] == 0.25 and [record["step"] for record in evaluations] == [2]


@pytest.mark.parametrize("with_load", [False, True])
def test_curves_are_drawn(tmp_path, with_load):
    write_log(tmp_path, with_load)
    path = draw_curves(tmp_path)
    if importlib.util.find_spec("matplotlib") is None:
        assert path is None
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_log_no_curves(tmp_path):
    assert draw_curves(tmp_path) is None
