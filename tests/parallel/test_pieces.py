"""Catches: a best token that is not the argmax of the whole row (ties between ranks, NaN, -0.0),
top rows that lose ties, a family split wrongly, bias added once per rank, heads cut in the middle,
proposals of a split drafter that differ, a share that is saved as if it were the model, or has
another fingerprint than the whole."""

from __future__ import annotations

import pytest
import torch
import zoo
import zoo_hybrid
from scripted import small_drafter

from eagle4 import Eagle4ForCausalLM
from eagle4.training.extract import extract
from tests.parallel import pieces
from tests.parallel.world import run_world

ALL = sorted({**zoo.FAMILIES, **zoo.MORE_FAMILIES})
HALVED = ["llama_tied", "gpt_oss", "phi3", "mixtral"]


def same_everywhere(results: list) -> dict:
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("size", [2, 4])
def test_shared_rows_know_what_whole_rows_know(size):
    wrong = [
        k for k, right in same_everywhere(run_world(size, pieces.vocabulary)).items() if not right
    ]
    assert not wrong


def test_every_family_gives_its_logits_or_is_refused():
    # On four ranks key/value heads are repeated, on two they are not.
    found = same_everywhere(run_world(4, pieces.families, ALL))
    halves = same_everywhere(run_world(2, pieces.families, HALVED))
    assert max(halves.values()) < 1e-4, halves
    refused = {name for name, error in found.items() if isinstance(error, str)}
    assert refused <= {"gpt2"} and "no tensor-parallel plan" in found["gpt2"]
    errors = {name: error for name, error in found.items() if name not in refused}
    assert len(errors) >= 18 and max(errors.values()) < 1e-4, errors


def test_hybrids_answer_as_on_one_process_or_are_refused():
    names = sorted(zoo_hybrid.HYBRIDS)
    wanted = pieces.hybrids(None, names)
    found = same_everywhere(run_world(2, pieces.hybrids, names))
    refused = {name for name in names if "no tensor-parallel plan" in found[name]}
    assert refused == {n for n in names if n.startswith(("bamba", "falcon_h1"))} | {"lfm2"}
    assert all(found[name] == wanted[name] for name in set(names) - refused)


def test_a_split_drafter_proposes_what_the_whole_one_does():
    errors = same_everywhere(run_world(4, pieces.drafters))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed here")
def test_shares_are_packed_like_whole_weights():
    found = same_everywhere(run_world(2, pieces.packing))
    assert found["1"] == found["0"] and found["packed 0"] == [0, 0]
    # q/k/v, o, gate/up and down of two layers; the drafter's, its eh_proj and its fc.
    assert found["packed 1"] == [8, 6]


@pytest.mark.slow
def test_compiled_rounds_of_ranks_are_whole_graphs_and_compiled_once():
    for found in run_world(2, pieces.compiled, timeout_s=400.0, limit_s=900.0):
        assert found["ids"] == found["wanted"] and not any(found["fails"])
        assert len(set(found["graphs"])) == 1 and found["graphs"][0] > 0


def test_loading_with_tp_size_and_what_a_share_refuses(tmp_path):
    target = zoo.build("llama")
    drafter = small_drafter(target)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    found = run_world(2, pieces.loading, str(tmp_path))
    ids = torch.tensor([[3, 5, 7]])
    whole = Eagle4ForCausalLM(target, drafter)
    assert [f["ids"] for f in found] == [
        whole.generate(ids, max_new_tokens=8, speculative=None, do_sample=False).tolist()
    ] * 2
    beams = whole.generate(ids, max_new_tokens=5, num_beams=2, do_sample=False).tolist()
    taps, last = extract(whole.target, [0, 2], torch.arange(2, 12))
    for own in found:
        for wanted, got in zip((taps, last), own["taps"], strict=True):
            assert torch.allclose(wanted.float(), torch.tensor(got), atol=1e-2), "training features"
        assert own["beams"] == beams, "outside the engine the model gives whole logits"
        assert "one share" in own["save"] and "only eagle4's own decoding" in own["foreign"]
        assert all("ranks [1] were asked something" in own[k] for k in ("different", "top-k"))
        assert "tp_size=3" in own["size"] and own["copy"]


def test_a_rank_that_left_does_not_exchange_nonsense():
    assert all("left its group" in text for text in run_world(2, pieces.leaving_alone))
