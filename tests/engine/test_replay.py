"""Catches: a recording that serves another call than its own (shapes, constants, modules, pools),
outputs that the next replay overwrites, arguments that change under the caller, recordings without
end or that keep dead pools alive, a failed recording that ends the request or differs among ranks,
a function that looks at its tensors on the host.

The recorder here replays on the CPU (`replaying`); the last test records CUDA graphs.
"""

from __future__ import annotations

import gc
import logging
import weakref
from typing import NamedTuple

import pytest
import torch
from replaying import CpuRecorder, HostAccess
from torch import nn

from eagle4.engine.recorder import CudaRecorder
from eagle4.engine.replay import Replays


class Pair(NamedTuple):
    rows: torch.Tensor
    pools: tuple[torch.Tensor, torch.Tensor]
    size: int = 1


class Other(NamedTuple):
    rows: torch.Tensor
    pools: tuple[torch.Tensor, torch.Tensor]
    size: int = 1


class Counted:
    """``scale * layer(rows) + pool``, written to the pool; counts how often it runs."""

    def __init__(self, fails: type[Exception] | None = None, after: int = 1):
        self.calls, self.fails, self.after = 0, fails, after

    def __call__(self, layer, pair, scale):
        self.calls += 1
        if self.fails is not None and self.calls > self.after:
            self.after = 1 << 30  # only the recording fails
            raise self.fails("this stream is capturing\nand more")
        out = scale * layer(pair.rows).float() * pair.size
        pair.pools[0].index_copy_(0, torch.arange(len(out)), out)
        pair.rows.add_(1)  # as growing a tree writes what it was given
        return Pair(out, (pair.rows, pair.pools[0] + pair.pools[1]), pair.size), None


def like(layer, pair, scale):
    """Names the arguments."""


def parts() -> tuple[nn.Linear, tuple[torch.Tensor, torch.Tensor]]:
    return nn.Linear(4, 4), (torch.zeros(8, 4), torch.ones(8, 4))


def rows_like(value: float, rows: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * 4, dtype=dtype).view(rows, 4) + value


def replays(**kwargs) -> tuple[Replays, CpuRecorder]:
    recorder = CpuRecorder()
    return Replays(recorder, frozenset({"pools"}), **kwargs), recorder


@torch.no_grad()
def test_a_replay_gives_what_the_function_gives_and_its_outputs_stay():
    owner, recorder = replays()
    layer, pools = parts()
    replayed = owner.wrap(Counted(), like)
    mine, theirs = [], []
    for value in range(5):
        rows = rows_like(value)
        mine.append(replayed(layer, Pair(rows, pools, 2), 3))
        # Directly (the first time) the argument is changed in place, replayed it is not.
        assert torch.equal(rows, rows_like(value + (value == 0)))
        other = torch.zeros(8, 4), torch.ones(8, 4)
        theirs.append(Counted()(layer, Pair(rows_like(value), other, 2), 3))
        assert torch.equal(pools[0], other[0])
        if value % 2:  # another key in between, whose replay overwrites this one's outputs
            replayed(layer, Pair(rows_like(value, rows=2), pools, 2), 3)
    for (pair, none), (expected, _) in zip(mine, theirs, strict=True):
        assert none is None and type(pair) is Pair and pair.size == 2
        assert torch.equal(pair.rows, expected.rows)
        assert torch.equal(pair.pools[0], expected.pools[0])
    # Of five and two calls the first each ran directly; the second ones recorded.
    assert recorder.recorded == owner.num_recordings == 2 and recorder.replayed == 5


@torch.no_grad()
def test_a_recording_serves_its_own_key_only():
    owner, recorder = replays()
    layer, pools = parts()
    replayed = owner.wrap(Counted(), like)
    usual = layer, Pair(rows_like(0), pools), 1
    others = [
        (layer, Pair(rows_like(0, rows=2), pools), 1),
        (layer, Pair(rows_like(0).T.contiguous().T, pools), 1),  # the same after all
        (layer, Pair(rows_like(0, dtype=torch.float64), pools), 1),
        (nn.Linear(4, 4), Pair(rows_like(0), pools), 1),
        (layer, Pair(rows_like(0), tuple(p.clone() for p in pools)), 1),
        (layer, Pair(rows_like(0), pools[::-1]), 1),
        (layer, Pair(rows_like(0), pools, 2), 1),
        (layer, Other(rows_like(0), pools), 1),
        (layer, Pair(rows_like(0), pools), 1.0),
        (layer, Pair(rows_like(0), pools), True),
    ]
    keys = set()
    for args in (usual, *others):
        moving: list[torch.Tensor] = []
        keys.add(replayed._key(args, moving))
        assert len(moving) == 1
    assert len(keys) == len(others)  # the usual one and all others but one
    with torch.inference_mode():
        assert replayed._key(usual, []) not in keys
    assert not recorder.recorded


@torch.no_grad()
def test_the_least_recently_used_recording_goes():
    owner, recorder = replays(most=3)
    layer, pools = parts()
    replayed = owner.wrap(Counted(), like)

    def call(rows: int) -> None:
        replayed(layer, Pair(rows_like(0, rows), pools), 1)

    for rows in (1, 1, 2, 2, 3, 3, 1, 4, 4):
        call(rows)
    assert recorder.recorded == 4 and owner.num_recordings == len(replayed.entries) == 3
    call(1)
    assert recorder.recorded == 4  # kept, because it was used after 2 and 3
    call(2)
    call(2)
    assert recorder.recorded == 5 and owner.num_recordings == 3


@torch.no_grad()
def test_recordings_go_with_their_pools_and_do_not_keep_them():
    owner, _ = replays()
    layer, pools = parts()
    kept = parts()[1]
    replayed = owner.wrap(Counted(), like)
    for own in (pools, pools, kept, kept):
        replayed(layer, Pair(rows_like(0), own), 1)
    assert owner.num_recordings == 2
    alive = [weakref.ref(pool) for pool in pools]
    del pools, own
    gc.collect()
    assert not any(pool() is not None for pool in alive)
    assert owner.num_recordings == 1 and len(owner._numbers) == 2
    replayed(layer, Pair(rows_like(0), kept), 1)
    assert owner.num_recordings == 1


@pytest.mark.parametrize("after", [1, 2], ids=["warming up", "capturing"])
@torch.no_grad()
def test_what_cannot_be_recorded_is_launched_directly(caplog, after):
    """One warning, and the call is answered; among ranks it is an error."""
    owner, recorder = replays()
    layer, pools = parts()
    counted = Counted(RuntimeError, after)
    replayed = owner.wrap(counted, like)
    with caplog.at_level(logging.WARNING, logger="eagle4"):
        for value in range(4):
            out, _ = replayed(layer, Pair(rows_like(value), pools), 1)
            assert torch.equal(out.rows, layer(rows_like(value)))
    (record,) = caplog.records
    assert "like cannot be recorded" in record.getMessage()
    assert record.getMessage().endswith("this stream is capturing")
    assert not owner.num_recordings and not recorder.replayed
    owner, _ = replays(falls_back=False)
    replayed = owner.wrap(Counted(RuntimeError, after), like)
    replayed(layer, Pair(rows_like(0), pools), 1)
    with pytest.raises(RuntimeError, match="capturing"):
        replayed(layer, Pair(rows_like(0), pools), 1)


@torch.no_grad()
def test_an_error_of_the_function_itself_is_the_callers():
    owner, _ = replays()
    layer, pools = parts()
    replayed = owner.wrap(Counted(), like)
    for _ in range(2):
        with pytest.raises(IndexError):
            replayed(layer, Pair(rows_like(0, rows=9), pools), 1)


@torch.no_grad()
def test_new_weights_autocast_and_a_pause():
    owner, recorder = replays()
    layer, pools = parts()
    counted = Counted()
    replayed = owner.wrap(counted, like)
    args = layer, Pair(rows_like(0), pools), 1
    owner.check(layer)
    replayed(*args), replayed(*args)
    assert owner.num_recordings == 1
    layer.weight.add_(1)  # in place: the addresses hold
    owner.check(layer)
    assert owner.num_recordings == 1
    calls = counted.calls
    with owner.paused():
        replayed(*args)
    with torch.autocast("cpu", torch.bfloat16):
        replayed(*args)
    assert counted.calls == calls + 2 and recorder.replayed == 1
    layer.weight.data = layer.weight + 1
    owner.check(layer)
    assert owner.num_recordings == 0


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.tolist(),
        lambda t: t[t > 0],
        lambda t: bool(t.any()),
        lambda t: t + torch.tensor([1, 2, 3, 4]),
    ],
    ids=["tolist", "mask", "bool", "host value"],
)
def test_the_recorder_sees_host_access(look):
    owner, _ = replays()

    def looks(rows):
        look(rows)
        return rows + 1

    replayed = owner.wrap(looks, looks)
    replayed(torch.ones(4))
    with pytest.raises(HostAccess):
        replayed(torch.ones(4))


@torch.no_grad()
def test_compiled_functions_replay_on_buffers():
    """As on a GPU, where what is captured is what the compiled callable launches."""
    owner = Replays(CpuRecorder(guards=False), frozenset({"pools"}))
    layer, pools = parts()

    def write(layer, pair, scale):
        out = scale * layer(pair.rows)
        pair.pools[0].index_copy_(0, torch.arange(out.shape[0]), out)
        return out + pair.pools[1][: out.shape[0]]

    replayed = owner.wrap(torch.compile(write, backend="eager", fullgraph=True, dynamic=True), like)
    for value in range(4):
        given = Pair(rows_like(value), pools)
        torch.testing.assert_close(replayed(layer, given, 2), write(layer, given, 2))
    assert owner.num_recordings == 1


@pytest.mark.cuda
@torch.no_grad()
def test_cuda_graphs_give_what_the_function_gives():
    """Two shapes in one memory pool, replayed in turn; then a function that cannot be captured."""
    device = torch.device("cuda")
    owner = Replays(CudaRecorder(device), frozenset({"pools"}))
    layer = nn.Linear(4, 4, device=device)
    pools = torch.zeros(8, 4, device=device), torch.ones(8, 4, device=device)

    def write(layer, pair, scale):
        out = scale * layer(pair.rows) * pair.size
        pair.pools[0].index_copy_(0, torch.arange(len(out), device=device), out)
        return Pair(out, (pair.rows + 1, pair.pools[0] + pair.pools[1]), pair.size)

    replayed, found = owner.wrap(write, like), []
    for value in range(4):
        for rows in (3, 2):
            given = Pair(rows_like(value, rows).to(device), pools, 2)
            found.append((replayed(layer, given, 3), write(layer, given, 3)))
    for mine, expected in found:
        torch.testing.assert_close(mine.rows, expected.rows)
        torch.testing.assert_close(mine.pools[0], expected.pools[0])
    assert owner.num_recordings == 2

    def looks(rows):
        return rows * rows.sum().item()

    here, direct = torch.cuda.current_stream(), owner.wrap(looks, looks)
    for _ in range(3):
        torch.testing.assert_close(direct(pools[1]), 32 * pools[1])
        assert torch.cuda.current_stream() == here
    assert owner.num_recordings == 2
