"""Importance weights and their statistics at a million tokens, beside the plain code."""

import pytest
import torch

from cotutor.kernels import importance_weights, importance_weights_reference

TOKENS = 1 << 20


def batch(bench, tokens: int):
    generator = torch.Generator(bench.device).manual_seed(0)
    rollout = -torch.rand(tokens, generator=generator, device=bench.device) * 3
    noise = torch.randn(tokens, generator=generator, device=bench.device)
    place = torch.arange(tokens, dtype=torch.int32, device=bench.device)
    return rollout + 0.3 * noise, rollout, place // 128, place // 512


def plain(logprobs, rollout, turns):
    """Token level, truncated, with the statistics that one usually logs."""
    trained = turns >= 0
    d = torch.where(trained, logprobs - rollout, 0)
    weights = torch.where(trained, d.exp().clamp(max=2.0), 0)
    count = trained.sum()
    mean = weights.sum() / count
    return weights, torch.stack(
        [
            mean,
            ((weights - mean) ** 2 * trained).sum() / count,
            1 / (((weights / mean) ** 2).sum() / count),
            (d > 0.6931).sum() / count,
            d.abs().sum() / count,
            -d.sum() / count,
            (d * d).sum() / 2 / count,
            (d.exp() - 1 - d).sum() / count,
            ((2 * d).exp() - 1).sum() / count,
        ]
    )


def check(bench, level: str) -> str:
    """Weights and statistics of 600 tokens against the definition in float64."""
    logprobs, rollout, turns, sequences = batch(bench, 600)
    options = {"level": level, "upper": 1.5}
    ids = {"turn_ids": turns, "sequence_ids": sequences}
    got = importance_weights(logprobs, rollout, **ids, **options)
    ids = {name: values.cpu() for name, values in ids.items()}
    want = importance_weights_reference(logprobs.cpu(), rollout.cpu(), **ids, **options)
    error = (got.weights.cpu().double() - want.weights).abs().max().item()
    torch.testing.assert_close(got.stats.sums.cpu(), want.stats.sums, rtol=1e-4, atol=1e-3)
    if not error < 1e-4:
        raise AssertionError(f"importance_weights, {level}: weights are off by {error:.1e}")
    return f"max error {error:.1e}, against float64"


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def bench_importance_weights(benchmark, bench, level):
    checked = bench.checked(f"importance_weights {level}", lambda: check(bench, level))
    logprobs, rollout, turns, sequences = batch(bench, TOKENS)
    options = {"turn_ids": turns, "level": level, "num_turns": TOKENS // 128}
    if level != "token":
        options |= {"sequence_ids": sequences, "num_sequences": TOKENS // 512}
    bench.measure(
        benchmark,
        "importance_weights",
        f"cotutor, {level}",
        lambda: importance_weights(logprobs, rollout, **options),
        checked=checked,
        moved=TOKENS * (4 + 4 + 4 + 4 + 1) if level == "token" else None,
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compile"])
def bench_importance_weights_plain(benchmark, bench, compiled):
    logprobs, rollout, turns, _ = batch(bench, TOKENS)
    function = torch.compile(plain, dynamic=False) if compiled else plain
    bench.measure(
        benchmark,
        "importance_weights",
        "torch.compile, token" if compiled else "plain PyTorch, token",
        lambda: function(logprobs, rollout, turns),
        checked="the yardstick",
        moved=TOKENS * (4 + 4 + 4 + 4 + 1),
        note="9 of the statistics",
    )
