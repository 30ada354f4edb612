"""Catches: tokens that differ from one process, in any mode, batch or way of decoding; ranks that
return different ids; logits gathered where pairs are enough; streams from several ranks."""

from __future__ import annotations

import pytest

from tests.parallel import cases
from tests.parallel.world import run_world

FULL = pytest.param(True, marks=pytest.mark.slow)


@pytest.mark.parametrize("is_full", [False, FULL], ids=["some", "all"])
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_are_those_of_one_process(size, is_full, tmp_path):
    """Every family, mode, batch and decoding; all combinations of them in the slow part."""
    alone = cases.everything(None, str(tmp_path), is_full)
    assert len(alone) == (60 if is_full else 14)
    for found in run_world(size, cases.everything, str(tmp_path), is_full, limit_s=900.0):
        assert found == alone


@pytest.mark.slow
def test_compiled_rounds_among_ranks():
    """The same graphs in every round: nothing is compiled late, nothing breaks, ids stay."""
    alone = cases.compiled(None)
    for found in run_world(2, cases.compiled, limit_s=900.0):
        assert found["ids"] == alone["ids"] and found["rounds"] >= 50
        assert found["late"] == found["breaks"] == 0


@pytest.fixture(scope="module")
def alone():
    return cases.others(None)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def together(request):
    return run_world(request.param, cases.others)


def test_other_ways_of_choosing_are_those_of_one_process(together, alone):
    for own in together:
        assert own["others"] == alone["others"]


def test_verification_exchanges_pairs_and_whole_rows_only_where_they_are_needed(together):
    for own in together:
        sent = own["bytes"]
        assert "rows" not in sent["greedy"] and "rows" not in sent["coupled"]
        assert "rows" not in sent["rejection"] and "rows" not in sent["top_k"]
        assert sent["repetition_penalty"]["rows"] > 0 and sent["scores"]["rows"] > 0


def test_only_the_first_rank_streams(together, alone):
    assert together[0]["streamed"] == alone["streamed"] and alone["streamed"]
    assert not any(own["streamed"] for own in together[1:])


@pytest.mark.parametrize("size", [2, 4])
def test_a_verification_takes_less_than_a_hundredth_of_whole_logits(size):
    for shares in run_world(size, cases.exchange_at_49k):
        for decoding, (sent, whole) in shares.items():
            print(f"{size} ranks, {decoding}: {sent:.0f} of {whole:.0f} bytes a round")
            assert 0 < sent <= 0.01 * whole, decoding
