"""Catches: a launch mode that is not checked or does not reach the rounds, their record or their
cost table; pools that move without need, are given away in use, or are read after they moved;
recordings of weights that are gone; recording while costs are measured.

Launches are recorded on the CPU (`replaying`).
"""

from __future__ import annotations

import json

import pytest
import torch
from replaying import record_on_cpu
from scripted import small_drafter
from tiny import tiny_llama, tiny_tokenizer

from eagle4 import Eagle4ForCausalLM
from eagle4.cli import main
from eagle4.engine import graphs as graphs_module
from eagle4.engine import home, loop
from eagle4.engine.call import CACHE_KEYWORD
from eagle4.engine.measure import COARSE
from eagle4.engine.replay import Replays
from tests.engine.compare import prompt, shared_target
from tests.engine.launched import Launched, replays_of


@pytest.fixture
def made(monkeypatch):
    """The recorders of this test's models."""
    return record_on_cpu(monkeypatch)


def test_pools_that_grow_take_their_recordings_with_them(made, monkeypatch):
    """Room is made a page at a time, so the pools move in the middle of the text."""
    monkeypatch.setattr(
        loop, "_reserve", lambda call, sequence: call.state.reserve(sequence, sequence.length)
    )
    both, moved = Launched(), []
    original = Replays.drop
    monkeypatch.setattr(
        Replays, "drop", lambda self, *args: (moved.append(args), original(self, *args))
    )
    both.same([30, 7], max_new_tokens=110)
    replays = replays_of(both.replayed)
    assert moved and made[0].recorded > replays.num_recordings
    pools = [kept for kind in replays.pools.values() for kept in kind._kept]
    alive = {id(t) for _, layers in pools for pair in layers.values() for t in pair}
    assert {id(ref()) for ref, _ in replays._numbers.values()} <= alive
    # The next call starts with as much room as this one ended with.
    moved.clear()
    both.same([30, 7], max_new_tokens=110)
    assert not moved


def test_a_cache_that_the_caller_keeps_is_its_own(made):
    """Pools in use are not given away; a second turn goes on with them."""
    both = Launched()
    first = both.same([6])
    kept = first[CACHE_KEYWORD]
    before = {k: [t.clone() for t in pair] for k, pair in kept.state.target_pool.layers.items()}
    both.same([9])
    for layer, pair in kept.state.target_pool.layers.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, before[layer], strict=True))
    more = torch.cat([first.sequences, torch.full((1, 4), 3)], dim=1)
    outs = [
        model.generate(
            more, do_sample=False, max_new_tokens=30, speculative={"max_depth": 4}, **cached
        )
        for model, cached in zip(both.models, ({}, {CACHE_KEYWORD: kept}), strict=True)
    ]
    assert torch.equal(*outs)


def test_recordings_of_weights_that_are_gone_go_too(made):
    both = Launched(tiny_llama(vocab=24, layers=2))
    both.same([6])
    assert replays_of(both.replayed).num_recordings
    head = both.replayed.target.lm_head.weight
    head.data = head.flip(0)
    both.same([6], max_new_tokens=2)  # one round: everything is seen for the first time
    assert not replays_of(both.replayed).num_recordings
    both.same([6])


def test_modes_are_checked():
    target = shared_target()
    with pytest.raises(ValueError, match="launch must be one of .*'graphs'.* got 'fast'"):
        Eagle4ForCausalLM(target, launch="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="launch must be one of"):
        Eagle4ForCausalLM.from_pretrained(target, launch="fast")  # type: ignore[arg-type]
    model = Eagle4ForCausalLM.from_pretrained(target, small_drafter(target), launch="graphs")
    with pytest.raises(ValueError, match="on cpu; move it to a CUDA device, or .*'direct'"):
        model.generate(**prompt([4]), max_new_tokens=2, speculative="eagle4")
    for mode in ("auto", "direct"):
        model.launch_mode = mode
        assert model.graphs() is graphs_module.EAGER


def test_a_saved_pair_takes_the_mode(tmp_path):
    target = tiny_llama(vocab=24, layers=2)
    Eagle4ForCausalLM(target, small_drafter(target)).save_pretrained(tmp_path)
    assert Eagle4ForCausalLM.from_pretrained(tmp_path, launch="direct").launch_mode == "direct"


def test_a_cost_table_belongs_to_replayed_or_direct_rounds(made):
    both = Launched()
    direct, replayed = (
        home.fingerprint(model.adapter, model.drafter, model.graphs()) for model in both.models
    )
    assert {k for k in direct if direct[k] != replayed[k]} == {"launch"}
    assert made[0].warms_up and both.replayed.graphs().decides_on(torch.device("cpu"))


def test_costs_are_measured_on_recordings(made, monkeypatch):
    """What is recorded while the clock runs would be a cost."""
    seen = []

    def measure(cases, *args):
        before = made[0].recorded, made[0].replayed
        for case in cases.values():
            case()
        seen.append((made[0].recorded - before[0], made[0].replayed - before[1]))

    monkeypatch.setattr(home, "measure", measure)
    model = Launched().replayed
    grid = COARSE._replace(verify_rows=(1, 4), plain_batches=(1, 2), root_rows=(2,), contexts=(40,))
    home.measure_pair(model.adapter, model.drafter, grid, graphs=model.graphs())
    ((new, replayed),) = seen
    assert new == 0 and replayed > len(grid.level_rows)


def test_the_command_line_passes_the_mode_on(tmp_path, monkeypatch, capsys):
    target = tiny_llama(layers=2)
    small_drafter(target).save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    folders = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    line = ["bench", *folders, "--device", "cpu", "--dtype", "float32", "--limit", "1"]
    line += ["--arms", "plain,eagle4", "--max-new-tokens", "12", "--no-harness", "--warmup", "0"]
    assert main([*line, "--launch", "graphs"]) == 2
    assert "launch='graphs' replays CUDA graphs" in capsys.readouterr().err
    made = record_on_cpu(monkeypatch)
    for mode in ("graphs", "direct"):
        assert main([*line, "--launch", mode, "--out", str(tmp_path / mode)]) == 0
        assert json.loads((tmp_path / f"{mode}.json").read_text())["setup"]["launch"] == mode
    assert len(made) == 1 and made[0].recorded
