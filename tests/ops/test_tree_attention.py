"""Catches: a wrong row, head, window, soft cap or sink in the attention over tree rows.

The judge is a float64 softmax per row and head, written as loops. The tolerance is what the same
loops lose in float32.
"""

from __future__ import annotations

import math

import pytest
import torch

from eagle4.ops import Share, fold_visible, ragged_attention, tree_attention

CASES = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "softcap and sinks": {"softcap": 1.5, "sinks": True, "scale": 0.7},
}


def brute_force(query, key, value, visible, scale=None, softcap=None, sinks=None):
    """``[B, M, H, Dv]``: one softmax per row and head over the visible keys, as Python loops."""
    batch, most, heads, width = query.shape
    groups = heads // key.shape[2]
    scale = width**-0.5 if scale is None else scale
    out = query.new_zeros(batch, most, heads, value.shape[-1])
    for b in range(batch):
        for m in range(most):
            seen = visible[b, m].nonzero().squeeze(1)
            for h in range(heads):
                score = (key[b, seen, h // groups] @ query[b, m, h]) * scale
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                top = score.max() if sinks is None else torch.maximum(score.max(), sinks[h])
                weight = torch.exp(score - top)
                total = weight.sum()
                if sinks is not None:
                    total = total + torch.exp(sinks[h] - top)
                out[b, m, h] = (weight / total) @ value[b, seen, h // groups]
    return out


def inputs(seed: int, heads: int, heads_kv: int, batch=2, most=4, length=11, width=8, width_v=6):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    visible = torch.rand(batch, most, length, generator=generator) < 0.4
    # Windows of different ends; a row that sees a single key; a row that sees all.
    visible[0, 0] = torch.arange(length) == 3
    visible[-1, -1] = True
    visible[:, :, 0] |= ~visible.any(dim=-1)
    return (
        2 * normal(batch, most, heads, width),
        2 * normal(batch, length, heads_kv, width),
        normal(batch, length, heads_kv, width_v),
        visible,
        normal(heads),
    )


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_every_row_is_a_softmax_over_what_it_sees(case, heads, heads_kv):
    options = dict(CASES[case])
    query, key, value, visible, sinks = inputs(heads + heads_kv, heads, heads_kv)
    if not options.pop("sinks", False):
        sinks = None
    found = tree_attention(query, key, value, visible, sinks_H=sinks, **options)
    exact = brute_force(
        query.double(),
        key.double(),
        value.double(),
        visible,
        sinks=None if sinks is None else sinks.double(),
        **options,
    )
    rough = brute_force(query, key, value, visible, sinks=sinks, **options)
    limit = 4 * max(float((rough - exact).abs().max()), torch.finfo(torch.float32).eps)
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert float((found - exact).abs().max()) <= limit


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_invisible_keys_have_no_weight_at_all(options):
    query, key, value, visible, sinks = inputs(0, 4, 2)
    before = tree_attention(query, key, value, visible, sinks_H=sinks, **options)
    unseen = ~visible.any(dim=1)
    assert unseen.any()
    key[unseen], value[unseen] = 1e4, -1e4
    assert torch.equal(tree_attention(query, key, value, visible, sinks_H=sinks, **options), before)


def test_a_sink_takes_probability_and_gives_nothing():
    query, key, value, visible, _ = inputs(0, 4, 2)
    plain = tree_attention(query, key, value, visible)
    none = tree_attention(query, key, value, visible, sinks_H=torch.full((4,), -math.inf))
    torch.testing.assert_close(none, plain, atol=1e-5, rtol=1e-5)
    everything = tree_attention(query, key, value, visible, sinks_H=torch.full((4,), 1e4))
    assert torch.equal(everything, torch.zeros_like(plain))


def test_a_large_softcap_changes_nothing():
    query, key, value, visible, _ = inputs(0, 4, 2)
    capped = tree_attention(query, key, value, visible, softcap=1e4)
    plain = tree_attention(query, key, value, visible)
    torch.testing.assert_close(capped, plain, atol=1e-5, rtol=1e-5)


def test_large_scores_stay_finite():
    query, key, value, visible, sinks = inputs(0, 4, 2)
    for options in ({}, {"softcap": 50.0}, {"sinks_H": sinks}):
        out = tree_attention(100 * query, 100 * key, value, visible, **options)
        assert torch.isfinite(out).all()


def test_strided_views_of_a_pool_are_read_in_place():
    """Keys arrive as views of ``[slots, heads, width]`` with other slots around them."""
    query, key, value, visible, _ = inputs(3, 4, 2)
    pools = [torch.full((2 * 16 + 5, *t.shape[2:]), 1e4) for t in (key, value)]
    views = []
    for pool, content in zip(pools, (key, value), strict=True):
        view = pool[5:].unflatten(0, (2, 16))[:, : content.shape[1]]
        view.copy_(content)
        views.append(view)
    assert torch.equal(
        tree_attention(query, *views, visible), tree_attention(query, key, value, visible)
    )


@pytest.mark.parametrize("case", list(CASES))
def test_ragged_rows_attend_to_their_own_runs(case):
    """Runs of slots in another order than the rows, with other entries between them."""
    options = dict(CASES[case])
    has_sinks = options.pop("sinks", False)
    lengths, counts = (7, 1, 5), (2, 1, 4)
    starts = (12, 3, 26)
    pools = [torch.full((40, 2, width), 1e4) for width in (8, 6)]
    shares, queries, expected, sinks = [], [], [], None
    for i, (length, count, start) in enumerate(zip(lengths, counts, starts, strict=True)):
        query, key, value, visible, own = inputs(
            i, 6, 2, batch=1, most=count, length=max(length, 4)
        )
        visible = visible[..., :length] | (torch.arange(length) == 0)
        sinks = own if sinks is None and has_sinks else sinks
        for pool, rows in zip(pools, (key, value), strict=True):
            pool[start : start + length] = rows[0, :length]
        shares.append(Share(sum(counts[:i]), start, fold_visible(visible, 3, torch.float32)))
        queries.append(query[0])
        seen = key[:, :length], value[:, :length], visible
        expected.append(tree_attention(query, *seen, sinks_H=sinks, **options)[0])
    found = ragged_attention(torch.cat(queries), *pools, shares, sinks_H=sinks, **options)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_low_precision_keeps_its_dtype_and_stays_near(dtype, softcap):
    query, key, value, visible, _ = inputs(5, 4, 2)
    low = [tensor.to(dtype) for tensor in (query, key, value)]
    found = tree_attention(*low, visible, softcap=softcap)
    exact = brute_force(*[tensor.double() for tensor in low], visible, softcap=softcap)
    assert found.dtype == dtype
    limit = 8 * torch.finfo(dtype).eps * float(value.abs().max())
    assert float((found.double() - exact).abs().max()) <= limit
