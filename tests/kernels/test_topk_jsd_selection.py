"""Exact top-K selection with the lower id first, on rows made to break it."""

import math

import pytest
import torch
from properties import given, settings
from properties import strategies as st

from cotutor.kernels.buckets import top_ids


def by_sorting(z: torch.Tensor, k: int) -> torch.Tensor:
    return z.float().sort(dim=1, descending=True, stable=True).indices[:, :k]


def adversarial_rows(vocab: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    noise = torch.randn(vocab, generator=generator)
    spike = torch.zeros(vocab)
    spike[-1] = 1.0
    half_infinite = noise.clone()
    half_infinite[::2] = -math.inf
    return {
        "constant": torch.full((vocab,), 1.5),
        "zeros of both signs": torch.where(noise > 0, 0.0, -0.0),
        "two-valued": (noise > 1).float(),
        "rising": torch.arange(vocab).float(),
        "falling": -torch.arange(vocab).float(),
        "plateaus": (noise * 2).round() / 2,
        "bfloat16": noise.bfloat16().float(),
        "negative": -noise.abs() - 3,
        "last one largest": spike,
        "half infinite": half_infinite,
        "all infinite": torch.full((vocab,), -math.inf),
        "one block holds all": torch.where(torch.arange(vocab) // 64 == 3, noise + 50, noise),
    }


@pytest.mark.parametrize("vocab", [300, 8192, 20_001])
@pytest.mark.parametrize("k", [1, 5, 100])
def test_adversarial_rows(device, vocab, k):
    rows = adversarial_rows(vocab)
    z = torch.stack(list(rows.values())).to(device)
    got, wanted = top_ids(z, k), by_sorting(z, k)
    for name, mine, true in zip(rows, got, wanted, strict=True):
        assert torch.equal(mine, true), name


def test_whole_vocabulary_and_no_rows(device):
    z = torch.randn(3, 70, device=device)
    assert torch.equal(
        top_ids(z, 70).sort(dim=1).values, torch.arange(70, device=device).expand(3, 70)
    )
    assert top_ids(z[:0], 5).shape == (0, 5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 3000), st.floats(0, 1), st.integers(1, 9), st.integers(0, 1 << 20))
def test_random_plateaus(vocab, share, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(0, levels, (2, vocab), generator=generator).float()
    k = max(1, min(vocab - 1, int(share * vocab)))
    assert torch.equal(top_ids(z, k), by_sorting(z, k))
    strided = torch.randint(0, levels, (vocab, 4), generator=generator).float().t()[::2]
    assert torch.equal(top_ids(strided, k), by_sorting(strided, k))
