"""Catches: noise that depends on the batch, on the order or number of the tokens that are looked
at, or on the device; streams, seeds, positions or purposes that share noise (F9); numbers outside
the open interval, a law that is not uniform or not Gumbel.
"""

from __future__ import annotations

import math

import pytest
import torch

from eagle4.noise import Purpose, gumbel, position_key, stream_key, uniform

MASK = (1 << 64) - 1


def reference(key: int, token: int) -> float:
    """SplitMix64 in plain integers."""
    value = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    value ^= value >> 31
    return ((value >> 12) + 0.5) * 2.0**-52


def test_the_tensor_code_is_splitmix64():
    for key in (0, 1, -1, 1 << 62, -(1 << 63), 123456789123456789):
        tokens = torch.tensor([0, 1, 2, 49151, 262143])
        wanted = [reference(key, token) for token in tokens.tolist()]
        assert uniform(key, tokens).tolist() == wanted


def test_the_published_sequence():
    """SplitMix64 seeded with 1234567, from its reference implementation."""
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = uniform(1234567, torch.arange(3))
    assert found.tolist() == [((value >> 12) + 0.5) * 2.0**-52 for value in first]


def test_a_token_has_its_noise_whatever_it_is_looked_at_with():
    key = position_key(stream_key(3, 0), Purpose.TOKEN, 17)
    whole = gumbel(key, torch.arange(1000))
    chosen = torch.tensor([[5, 999], [0, 5]])
    assert torch.equal(gumbel(key, chosen), whole[chosen])
    keys = torch.tensor([[key], [key + 1]])
    assert torch.equal(gumbel(keys, chosen)[0], whole[chosen[0]])


def test_seeds_streams_purposes_and_positions_are_separate():
    keys = {
        position_key(stream_key(seed, stream), purpose, position)
        for seed in (*range(-3, 4), 1 << 63, (1 << 64) - 1000)
        for stream in range(5)
        for purpose in Purpose
        for position in range(20)
    }
    assert len(keys) == 9 * 5 * 3 * 20
    assert stream_key(1, 0) != stream_key(0, 1)
    columns = torch.stack([uniform(key, torch.arange(64)) for key in sorted(keys)[:300]])
    correlation = torch.corrcoef(columns)
    correlation.fill_diagonal_(0)
    # 45,000 pairs of 64 numbers: the largest is about 4.5 / sqrt(64).
    assert correlation.abs().max() < 0.7
    assert correlation.abs().mean() < 0.12


def test_uniform_and_gumbel_laws():
    keys = torch.tensor([position_key(stream_key(9, 0), Purpose.TOKEN, p) for p in range(400)])
    numbers = uniform(keys[:, None], torch.arange(500)).flatten()
    assert 0 < float(numbers.min()) and float(numbers.max()) < 1
    counts = torch.histc(numbers, 100, 0, 1)
    chi = float(((counts - 2000) ** 2 / 2000).sum())
    assert abs(chi - 99) < 5 * math.sqrt(2 * 99)
    noise = gumbel(keys[:, None], torch.arange(500))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_the_ends_of_the_interval_are_finite():
    ends = torch.tensor([0.5 * 2.0**-52, ((1 << 52) - 0.5) * 2.0**-52], dtype=torch.float64)
    assert float(ends[1]) < 1
    assert torch.isfinite(-(-ends.log()).log()).all()


@pytest.mark.cuda
def test_bits_are_the_same_on_a_gpu():
    keys, tokens = torch.arange(-50, 50)[:, None] * 987654321987, torch.arange(5000)
    assert torch.equal(uniform(keys, tokens), uniform(keys.cuda(), tokens.cuda()).cpu())
