"""Catches: ancestry that is padded into other rows, snapshots where nothing could resume."""

from __future__ import annotations

import pytest
from packed import Rows, chain, window

from eagle4.cache.lineage import Lineage, as_slice


def test_padding_rows_descend_from_themselves_alone():
    lineage = Lineage([window(Rows(3, 0, [0] * 3, [-1, 0, 0])), window(chain(1, 4, [0]))], False)
    assert lineage.first_rows == [0, 3] and lineage.slots == [3, 1]
    assert lineage.ancestors_BMM.int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    ]


@pytest.mark.parametrize(
    ("prefix", "count", "row"),
    [(0, 64, None), (0, 65, 64), (0, 300, 256), (10, 60, 54), (64, 64, None), (128, 512, 448)],
)
def test_a_snapshot_leaves_a_row_to_run(prefix, count, row):
    assert Lineage([window(chain(0, prefix, [0] * count))], True).snapshot_row == row
    assert Lineage([window(chain(0, prefix, [0] * count))], False).snapshot_row is None


def test_runs_are_slices():
    assert as_slice([2, 3, 4]) == slice(2, 5)
    assert as_slice([2, 4]) == [2, 4] and as_slice([1, 0]) == [1, 0]
