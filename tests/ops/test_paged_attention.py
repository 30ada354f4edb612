"""Catches: a key read from the wrong page, a row that sees a key too many or too few at the seams
(prefix and window, words of 64 bits, parts), a window counted in entries instead of positions,
parts merged with the wrong weight, empty parts that turn into NaN, sinks counted once per part.

The judge looks every key up by hand and takes one softmax per row and head in float64.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from packed import ancestry, store

from eagle4.cache import KVPool, PageTable, Window, attend, build_step
from eagle4.ops import PagedView, pack_bits, paged_attention
from tests.ops.kernels import CHECKS, DEVICE, generator, random_parents
from tests.ops.test_tree_attention import brute_force


class Case(NamedTuple):
    """Sizes of one batch; ``rows`` new rows of a window of ``window`` entries."""

    prefixes: tuple[int, ...]
    rows: int
    window: int
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    width_v: int = 8
    page_size: int = 8
    kind: str = "random"
    sliding: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None


class Batch(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    view: PagedView
    sinks: torch.Tensor
    member: torch.Tensor  # [B, M, W]

    def to(self, device, dtype) -> Batch:
        query, key, value, sinks = (
            t.to(device, dtype) for t in (self.query, self.key, self.value, self.sinks)
        )
        view = PagedView(*(t.to(device) for t in self.view))
        return Batch(query, key, value, view, sinks, self.member)


def make(case: Case, seed: int) -> Batch:
    source, noise = random.Random(seed), generator(seed)
    batch = len(case.prefixes)
    pages = -(-(max(case.prefixes) + case.window) // case.page_size)
    order = torch.randperm(batch * pages + 2, generator=noise)[: batch * pages]
    member = torch.zeros(batch, case.rows, case.window, dtype=torch.bool)
    position = torch.zeros(batch, case.window, dtype=torch.int64)
    for b, prefix in enumerate(case.prefixes):
        # Window entry 0 is the root, which all see; node i is entry i + 1.
        nodes = random_parents(source, case.window - 1, case.kind)
        seen = ancestry([-1, *(parent + 1 for parent in nodes)])
        member[b] = seen[case.window - case.rows :]
        position[b] = prefix + seen.sum(dim=1) - 1
    slots = (batch * pages + 2) * case.page_size

    def normal(*shape):
        return torch.randn(*shape, generator=noise)

    key, value = (
        normal(slots, case.kv_heads, case.width),
        normal(slots, case.kv_heads, case.width_v),
    )
    view = PagedView(
        order.view(batch, pages),
        torch.tensor(case.prefixes),
        pack_bits(member),
        position[:, case.window - case.rows :].clone(),
        position,
    )
    query = 2 * normal(batch, case.rows, case.heads, case.width)
    return Batch(query, key, value, view, normal(case.heads), member)


def judge(batch: Batch, case: Case) -> torch.Tensor:
    """Key by key, in float64."""
    longest = max(case.prefixes) + case.window
    keys, values, visible = [], [], torch.zeros(len(case.prefixes), case.rows, longest).bool()
    for b, prefix in enumerate(case.prefixes):
        pages = batch.view.page_BP[b].tolist()
        places = [divmod(entry, case.page_size) for entry in range(longest)]
        slots = [pages[min(p, len(pages) - 1)] * case.page_size + o for p, o in places]
        keys.append(batch.key[slots])
        values.append(batch.value[slots])
        for m in range(case.rows):
            at = int(batch.view.query_position_BM[b, m])
            for entry in range(prefix + case.window):
                j = entry - prefix
                sees = j < 0 or bool(batch.member[b, m, j])
                where = entry if j < 0 else int(batch.view.window_position_BW[b, j])
                visible[b, m, entry] = sees and (case.sliding is None or at - where < case.sliding)
    sinks = batch.sinks.double() if case.sinks else None
    tensors = (t.double() for t in (batch.query, torch.stack(keys), torch.stack(values)))
    return brute_force(*tensors, visible, case.scale, case.softcap, sinks)


CASES = {
    "one row": Case((5,), 1, 1),
    "empty prefix": Case((0,), 3, 3),
    "tree": Case((21, 9, 0), 6, 6),
    "chain": Case((17,), 9, 9, kind="chain"),
    "star": Case((17,), 9, 9, kind="star"),
    "64 nodes and the root": Case((33,), 65, 65, 2, 1),
    "late rows of a window": Case((12, 30), 4, 70, kind="chain"),
    "one head per group": Case((19,), 4, 4, heads=2, kv_heads=2),
    "three heads per group": Case((19, 3), 4, 5, heads=6, kv_heads=2),
    "eight heads per group": Case((19,), 3, 3, heads=8, kv_heads=1),
    "window below the prefix": Case((40, 25), 5, 7, sliding=6),
    "window of one": Case((11,), 4, 4, sliding=1),
    "window that cuts the tree": Case((3,), 8, 8, kind="chain", sliding=4),
    "soft cap": Case((14,), 4, 4, softcap=1.5),
    "sinks": Case((14, 2), 4, 4, sinks=True),
    "everything": Case((70, 9), 5, 6, 6, 2, 12, 20, 16, "random", 33, 2.0, True, 0.4),
    "keys wider than values": Case((9,), 3, 3, width=24, width_v=16),
}


def options(case: Case, batch: Batch) -> dict:
    sinks = batch.sinks if case.sinks else None
    return {
        "scale": case.scale,
        "sliding_window": case.sliding,
        "softcap": case.softcap,
        "sinks_H": sinks,
    }


@pytest.mark.parametrize("name", list(CASES))
def test_the_reference_attends_what_the_definition_names(name):
    case = CASES[name]
    batch = make(case, len(name))
    found = paged_attention(*batch[:4], case.page_size, **options(case, batch), impl="torch")
    assert float((found - judge(batch, case)).abs().max()) < 1e-5


@pytest.mark.kernels
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_the_kernel_attends_the_same(name, splits):
    run_kernel(CASES[name], splits, torch.float32, len(name), 2e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_kernel_at_the_usual_widths(width):
    for groups, dtype, limit in ((1, torch.bfloat16, 0.04), (3, torch.float32, 3e-5)):
        case = Case((37,), 3, 4, heads=2 * groups, width=width, width_v=width, page_size=64)
        run_kernel(case, 2, dtype, width, limit)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_on_random_batches(seed):
    source = random.Random(seed)
    kv_heads, window = source.choice([1, 2]), source.randint(1, 70)
    case = Case(
        tuple(source.randint(0, 90) for _ in range(source.randint(1, 3))),
        source.randint(1, window),
        window,
        kv_heads * source.choice([1, 3, 8]),
        kv_heads,
        page_size=source.choice([4, 16, 64]),
        kind=source.choice(["random", "chain", "star"]),
        sliding=source.choice([None, 1, 7, 200]),
        softcap=source.choice([None, 3.0]),
        sinks=source.random() < 0.5,
    )
    run_kernel(case, source.choice([None, 1, 2, 5]), torch.float32, seed, 2e-5)


def run_kernel(case: Case, splits: int | None, dtype: torch.dtype, seed: int, limit: float):
    from eagle4.ops.triton.paged_attention import paged_attention as kernel

    rounded = make(case, seed).to("cpu", dtype)
    batch = rounded.to(DEVICE, dtype)
    found = kernel(*batch[:4], case.page_size, num_splits=splits, **options(case, batch))
    assert found.dtype == dtype
    assert float((found.cpu() - judge(rounded, case)).abs().max()) < limit


@pytest.mark.kernels
def test_slots_that_no_row_sees_do_not_matter():
    from eagle4.ops.triton.paged_attention import paged_attention as kernel

    case = CASES["tree"]
    batch = make(case, 3).to(DEVICE, torch.float32)
    before = kernel(*batch[:4], case.page_size, num_splits=2)
    used = torch.zeros(len(batch.key), dtype=torch.bool)
    for b, prefix in enumerate(case.prefixes):
        for entry in range(prefix + case.window):
            page, offset = divmod(entry, case.page_size)
            used[int(batch.view.page_BP[b, page]) * case.page_size + offset] = True
    batch.key[~used], batch.value[~used] = float("nan"), float("nan")
    assert torch.equal(kernel(*batch[:4], case.page_size, num_splits=2), before)


@pytest.mark.kernels
def test_the_operator_is_well_declared():
    case = CASES["everything"]
    batch = make(case, 1).to(DEVICE, torch.float32)
    for splits in (1, 2):
        args = (*batch[:3], *batch.view, batch.sinks, case.page_size, 0.3, 33, 2.0, splits)
        torch.library.opcheck(torch.ops.eagle4.paged_attention, args, test_utils=CHECKS)


@pytest.mark.parametrize("sliding", [None, 5])
def test_a_paged_step_reads_what_a_dense_step_reads(sliding):
    """Three sequences in scattered pages, with drafted rows behind what is committed."""
    source, noise = random.Random(0), generator(0)
    table, pool = PageTable(3, 4), KVPool()
    for size in range(4, 41, 4):
        for sequence in range(3):
            table.ensure(sequence, size)
    pool.resize(table.num_slots)
    store(
        pool, 0, torch.arange(table.num_slots), *(_noise(noise, table.num_slots, 2) for _ in "kv")
    )
    windows = []
    for sequence, (prefix, width, offset) in enumerate([(11, 6, 2), (0, 1, 0), (20, 9, 3)]):
        seen = ancestry(random_parents(source, width))
        position = prefix + seen.sum(dim=1) - 1
        windows.append(Window(sequence, prefix, offset, position, seen[offset:]))
    rows = sum(len(window.visible) for window in windows)
    tensors = [_noise(noise, rows, heads) for heads in (4, 2, 2)]
    outs = []
    for paged in (False, True):
        step = build_step(table, windows, torch.device("cpu"), paged=paged)
        outs.append(attend(pool, 0, step, *tensors, sliding_window=sliding))
    torch.testing.assert_close(*outs, atol=1e-6, rtol=1e-5)


def _noise(noise: torch.Generator, rows: int, heads: int) -> torch.Tensor:
    return torch.randn(rows, heads, 8, generator=noise)
