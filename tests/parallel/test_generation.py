"""Catches: tokens that differ from one process, in any mode, batch or way of decoding; ranks that
return different ids; logits gathered where pairs are enough; streams from several ranks."""

from __future__ import annotations

import pytest

from tests.parallel import cases
from tests.parallel.world import run_world


@pytest.fixture(scope="module", params=[2, 4])
def world(request, tmp_path_factory):
    """Size, and everything that its ranks answered in one go."""
    folder = str(tmp_path_factory.mktemp("profiles"))
    return request.param, run_world(request.param, cases.everything, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return cases.everything(None, str(tmp_path_factory.mktemp("profiles")))


@pytest.mark.parametrize("family", cases.FAMILIES)
@pytest.mark.parametrize("mode", cases.MODES)
def test_tokens_are_those_of_one_process(world, alone, family, mode):
    size, answers = world
    compared = 0
    for key, wanted in alone["answers"].items():
        if key[:2] == (family, mode):
            assert [own["answers"][key] for own in answers] == [wanted] * size, key
            compared += 1
    assert compared == (4 if family == "llama" else 2)


def test_other_ways_of_choosing_are_those_of_one_process(world, alone):
    size, answers = world
    for name, wanted in alone["others"].items():
        assert [own["others"][name] for own in answers] == [wanted] * size, name


def test_verification_exchanges_pairs_and_whole_rows_only_where_they_are_needed(world):
    _, answers = world
    for own in answers:
        sent = own["bytes"]
        assert "rows" not in sent["greedy"] and "rows" not in sent["coupled"]
        assert "rows" not in sent["rejection"] and "rows" not in sent["top_k"]
        assert sent["repetition_penalty"]["rows"] > 0 and sent["scores"]["rows"] > 0


def test_only_the_first_rank_streams(world, alone):
    _, answers = world
    assert answers[0]["streamed"] == alone["streamed"] and alone["streamed"]
    assert not any(own["streamed"] for own in answers[1:])


@pytest.mark.parametrize("size", [2, 4])
def test_a_verification_takes_less_than_a_hundredth_of_whole_logits(size):
    for shares in run_world(size, cases.exchange_at_49k):
        for decoding, (sent, whole) in shares.items():
            print(f"{size} ranks, {decoding}: {sent:.0f} of {whole:.0f} bytes a round")
            assert 0 < sent <= 0.01 * whole, decoding
