"""Catches: a size that cannot work and is found out in the first forward, an error without the
sizes that would work, a style of a plan that is ignored, shares that overlap or leave gaps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import zoo
from transformers import AutoConfig, LlamaConfig

from eagle4.parallel import launch
from eagle4.parallel.linear import share_of, share_of_heads
from eagle4.parallel.plan import check_size, plan_of
from eagle4.target.families import PROVEN

SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM2 |= {"intermediate_size": 1536, "vocab_size": 49152}


def config_of(model_type: str, **overrides):
    return AutoConfig.for_model(model_type, **{**zoo.SIZES, **overrides})


@pytest.mark.parametrize("size", [1, 3, 9])
def test_sizes_need_not_be_powers_of_two(size):
    # 9 ranks share 3 key/value heads in threes; 1536 does not divide by 9.
    inner = 1536 if size < 9 else 1539
    check_size(LlamaConfig(**{**SMOLLM2, "intermediate_size": inner}), size)


@pytest.mark.parametrize("size", [2, 4, 5, 9])
def test_impossible_sizes_are_refused_with_those_that_work(size):
    with pytest.raises(ValueError, match=rf"tp_size={size} .* 9 attention heads.*\[1, 3\]"):
        check_size(LlamaConfig(**SMOLLM2), size)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match="positive integer"):
        check_size(LlamaConfig(**SMOLLM2), size)


def test_key_value_heads_may_be_fewer_than_ranks_but_must_fit():
    check_size(LlamaConfig(**zoo.SIZES), 4)  # 2 key/value heads on 4 ranks
    with pytest.raises(ValueError, match="3 key/value heads"):
        check_size(LlamaConfig(**{**zoo.SIZES, "num_key_value_heads": 3}), 4)


def test_every_proven_family_has_a_plan_or_a_refusal_that_names_it():
    without = set()
    for family in PROVEN:
        try:
            assert plan_of(config_of(family))
        except ValueError as error:
            assert family in str(error)
            without.add(family)
    assert without <= {"gpt2"}


def test_a_style_that_is_not_understood_is_an_error():
    config = LlamaConfig(**SMOLLM2)
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(ValueError, match="diagonal"):
        plan_of(config)


@pytest.mark.parametrize("total", [1, 7, 12, 24, 50257])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shares_follow_each_other_and_cover_everything(total, size):
    shares = [share_of(total, SimpleNamespace(rank=r, size=size)) for r in range(size)]  # type: ignore
    assert shares[0].first == 0 and shares[-1].last == total
    assert all(a.last == b.first for a, b in zip(shares, shares[1:], strict=False))
    assert len({s.size for s in shares[:-1]} | {0}) <= 2 or total < size * size


@pytest.mark.parametrize(("heads", "size", "wanted"), [(2, 4, [0, 0, 1, 1]), (4, 2, [0, 2])])
def test_fewer_heads_than_ranks_are_repeated(heads, size, wanted):
    shares = [share_of_heads(heads, 8, SimpleNamespace(rank=r, size=size)) for r in range(size)]  # type: ignore
    assert [s.first // 8 for s in shares] == wanted
    assert {s.size for s in shares} == {8 * max(1, heads // size)}


def test_without_a_launcher_the_error_says_how_to_launch(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 4"):
        launch.check_launched(4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="one of 2"):
        launch.check_launched(4)
    launch.check_launched(2)
